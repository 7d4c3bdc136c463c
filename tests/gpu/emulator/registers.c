/* Where a warp's registers lie. LLVM's PTX has thousands of virtual registers; those that are not needed at the same time
 * share a place, so that a warp's registers stay in the cache.
 *
 * Liveness by blocks, then one interval per register in the order of the text (linear scan: Poletto and Sarkar, 1999).
 * A register is a value per lane and each lane goes its own way, so what is right for one thread is right for a warp.
 */
#include "ptx.h"

typedef struct { int start, end, reg; } Interval;

static int by_start(const void *x, const void *y) {
    const Interval *a = x, *b = y;
    return a->start != b->start ? (a->start < b->start ? -1 : 1) : a->reg - b->reg;
}
static int by_inst(const void *x, const void *y) {
    const Ref *a = x, *b = y;
    return a->inst != b->inst ? (a->inst < b->inst ? -1 : 1) : (int)a->def - (int)b->def;
}
static bool is_control(const Inst *i, int op) { return !i->fn && i->op == op; }

void place_registers(Compiler *c) {
    Func *f = c->f;
    int n = f->n, nblocks = 0, words = (c->nregs + 63) / 64;
    if (c->nrefs) qsort(c->refs, (size_t)c->nrefs, sizeof *c->refs, by_inst);
    int *block_of = malloc(sizeof(int) * (size_t)(n + 1)), *first = malloc(sizeof(int) * (size_t)(n + 2));
    for (int i = 0; i < n; i++) {
        bool leader = !i || is_control(&f->code[i], C_LABEL) || is_control(&f->code[i - 1], C_BRA) || is_control(&f->code[i - 1], C_JMP) ||
                      is_control(&f->code[i - 1], C_EXIT);
        if (leader) first[nblocks++] = i;
        block_of[i] = nblocks - 1;
    }
    first[nblocks] = n;
    size_t bytes = sizeof(u64) * (size_t)words * (size_t)nblocks;
    u64 *gen = calloc(1, bytes), *kill = calloc(1, bytes), *in = calloc(1, bytes), *out = calloc(1, bytes);
    bool guarded = false;
    int at = 0;
    for (int i = 0; i < n; i++) {
        if (is_control(&f->code[i], C_GUARD)) guarded = true;
        if (is_control(&f->code[i], C_UNGUARD)) guarded = false;
        u64 *g = gen + (size_t)block_of[i] * (size_t)words, *k = kill + (size_t)block_of[i] * (size_t)words;
        for (; at < c->nrefs && c->refs[at].inst == i; at++) { /* uses come before definitions */
            int r = c->refs[at].reg;
            u64 bit = 1ull << (r & 63);
            if (!c->refs[at].def || guarded) { /* a guarded instruction keeps what the other lanes have */
                if (!(k[r / 64] & bit)) g[r / 64] |= bit;
            } else k[r / 64] |= bit;
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (int b = nblocks - 1; b >= 0; b--) {
            const Inst *last = &f->code[first[b + 1] - 1];
            int next[2] = {-1, -1};
            bool falls = !is_control(last, C_JMP) && !is_control(last, C_EXIT);
            if (is_control(last, C_EXIT) && first[b + 1] < n) falls = true; /* a guarded one */
            if (falls && b + 1 < nblocks) next[0] = b + 1;
            if ((is_control(last, C_BRA) || is_control(last, C_JMP)) && last->imm >= 0) next[1] = block_of[last->imm];
            u64 *o = out + (size_t)b * (size_t)words, *x = in + (size_t)b * (size_t)words;
            for (int s = 0; s < 2; s++)
                if (next[s] >= 0)
                    for (int j = 0; j < words; j++) o[j] |= in[(size_t)next[s] * (size_t)words + (size_t)j];
            for (int j = 0; j < words; j++) {
                u64 v = gen[(size_t)b * (size_t)words + (size_t)j] | (o[j] & ~kill[(size_t)b * (size_t)words + (size_t)j]);
                if (v != x[j]) x[j] = v, changed = true;
            }
        }
    }
    Interval *iv = malloc(sizeof *iv * (size_t)c->nregs);
    for (int r = 0; r < c->nregs; r++) iv[r] = (Interval){INT32_MAX, -1, r};
#define SEEN(r, p) (iv[r].start = (p) < iv[r].start ? (p) : iv[r].start, iv[r].end = (p) > iv[r].end ? (p) : iv[r].end)
    for (int i = 0; i < c->nrefs; i++) {
        SEEN(c->refs[i].reg, c->refs[i].inst);
        if (c->refs[i].def) SEEN(c->refs[i].reg, c->refs[i].inst + 1); /* also one that nobody reads: it is written */
    }
    for (int b = 0; b < nblocks; b++)
        for (int j = 0; j < words; j++) {
            for (u64 v = in[(size_t)b * (size_t)words + (size_t)j]; v; v &= v - 1) SEEN(j * 64 + __builtin_ctzll(v), first[b]);
            for (u64 v = out[(size_t)b * (size_t)words + (size_t)j]; v; v &= v - 1) SEEN(j * 64 + __builtin_ctzll(v), first[b + 1] - 1);
        }
    int place = 0, most = 0, live = 0;
    for (int i = 0; i < c->nregs; i++) {
        VReg *r = &c->regs[i];
        if (r->constant || r->special) r->offset = place, place += r->bytes ? (r->bytes * WARP + 63) / 64 * 64 : 64;
    }
    /* per size: places that are free, and registers that have one, by the end of their use */
    if (c->nregs) qsort(iv, (size_t)c->nregs, sizeof *iv, by_start);
    Interval *active = malloc(sizeof *active * (size_t)c->nregs);
    int *spare[4], nspare[4] = {0}, nactive = 0;
    for (int s = 0; s < 4; s++) spare[s] = malloc(sizeof(int) * (size_t)(c->nregs + 1));
#define CLASS(b) ((b) == 0 ? 0 : (b) == 2 ? 1 : (b) == 4 ? 2 : 3)
    for (int i = 0; i < c->nregs; i++) {
        VReg *r = &c->regs[iv[i].reg];
        if (r->constant || r->special || iv[i].end < 0) continue;
        int kept = 0;
        for (int j = 0; j < nactive; j++) {
            VReg *a = &c->regs[active[j].reg];
            if (active[j].end < iv[i].start || (active[j].end == iv[i].start && CLASS(a->bytes) == CLASS(r->bytes)))
                spare[CLASS(a->bytes)][nspare[CLASS(a->bytes)]++] = a->offset, live -= a->bytes == 8 ? 2 : a->bytes == 4;
            else active[kept++] = active[j];
        }
        nactive = kept;
        int s = CLASS(r->bytes);
        if (nspare[s]) r->offset = spare[s][--nspare[s]];
        else r->offset = place, place += r->bytes ? (r->bytes * WARP + 63) / 64 * 64 : 64;
        active[nactive++] = iv[i];
        live += r->bytes == 8 ? 2 : r->bytes == 4;
        if (live > most) most = live;
    }
    f->reg_bytes = place, f->registers = most;
    free(block_of), free(first), free(gen), free(kill), free(in), free(out), free(iv), free(active);
    for (int s = 0; s < 4; s++) free(spare[s]);
}
