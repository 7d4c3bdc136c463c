/* Runs the blocks of a launch: warps of a block in turn until they wait at a barrier, lanes in groups of one address.
 *
 * Lanes that went different ways form groups; the group with the lowest address runs, and groups that meet become one.
 * An instruction that needs other lanes (shfl.sync, bar.sync, mma) makes its group wait until they are there.
 */
#include <stdarg.h>
#include <time.h>

#include "emulator.h"

#define LIMIT 4000000000ll
enum { PATIENCE = 1000 }; /* rounds in which all warps only test barriers in shared memory, before that is an error */
enum { SLICE = 200000 }; /* branches a warp takes before another warp gets its turn, so that a spinning warp ends */
static pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- findings ---------------------------------------------------------------------------------------------------- */
void finding(Warp *w, const Inst *i, u32 lanes, const char *fmt, ...) {
    Block *b = w->block;
    Launch *L = b->launch;
    int expected = 0;
    if (atomic_compare_exchange_strong(&L->error, &expected, CU_ILLEGAL_ADDRESS)) {
        char what[512], threads[96], text[200] = "";
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(what, sizeof what, fmt, ap);
        va_end(ap);
        if (i && i->line > 0 && i->line <= L->f->module->nlines) {
            const char *s = L->f->module->lines[i->line - 1];
            while (*s == ' ' || *s == '\t') s++;
            snprintf(text, sizeof text, "%s", s);
            for (char *p = text; *p; p++) if (*p == '\t') *p = ' ';
        }
        if (lanes && !(lanes & (lanes - 1))) snprintf(threads, sizeof threads, "thread %d", w->id * WARP + __builtin_ctz(lanes));
        else snprintf(threads, sizeof threads, "warp %d (threads %d to %d, lanes %08x)", w->id, w->id * WARP, w->id * WARP + w->lanes - 1, lanes);
        pthread_mutex_lock(&print_lock);
        fprintf(stderr,
                "[emulated GPU] kernel %s, block (%u, %u, %u) of (%u, %u, %u), %s of (%u, %u, %u): %s; at PTX line %d: %s\n",
                L->f->name, b->id[0], b->id[1], b->id[2], L->grid[0], L->grid[1], L->grid[2], threads, L->block[0], L->block[1], L->block[2],
                what, i ? i->line : 0, text);
        pthread_mutex_unlock(&print_lock);
    }
    longjmp(b->out, 1);
}

/* ---- lanes -------------------------------------------------------------------------------------------------------- */
static void park(Warp *w, int pc, u32 mask, bool waits) {
    for (int i = 0; i < w->ng; i++)
        if (w->g[i].pc == pc && w->g[i].waits == waits) {
            w->g[i].mask |= mask;
            return;
        }
    w->g[w->ng++] = (Group){pc, mask, waits};
}
static void find_lowest(Warp *w) {
    w->minpc = INT32_MAX;
    for (int i = 0; i < w->ng; i++)
        if (!w->g[i].waits && w->g[i].pc < w->minpc) w->minpc = w->g[i].pc;
}
/* takes the runnable group with the lowest address; false if none can run */
static bool next_group(Warp *w, u32 *mask) {
    find_lowest(w);
    if (w->minpc == INT32_MAX) return false;
    int pc = w->minpc, kept = 0;
    u32 m = 0;
    for (int i = 0; i < w->ng; i++) {
        if (!w->g[i].waits && w->g[i].pc == pc) m |= w->g[i].mask;
        else w->g[kept++] = w->g[i];
    }
    w->ng = kept, w->pc = pc, *mask = m;
    find_lowest(w);
    return true;
}

static void __attribute__((noreturn)) stuck(Warp *w, const Inst *code) {
    const Inst *i = &code[w->g[0].pc];
    for (int j = 1; j < w->ng; j++)
        if (w->g[j].pc != w->g[0].pc)
            finding(w, i, w->g[0].mask, "lanes %08x wait here and lanes %08x at PTX line %d, each for the others", w->g[0].mask, w->g[j].mask,
                    code[w->g[j].pc].line);
    finding(w, i, w->g[0].mask, "lanes %08x wait here for lanes that never come", w->g[0].mask);
}

enum Result { R_BARRIER, R_DONE, R_YIELD };

static enum Result run(Warp *w) {
    w->waits = false;
    Block *b = w->block;
    Func *f = b->launch->f;
    const Inst *code = f->code, *I;
    char *R = w->regs;
    u32 act, m;
    s64 budget = SLICE;
    if (!next_group(w, &act)) {
        if (!w->live) return R_DONE;
        stuck(w, code);
    }
    I = code + w->pc, m = act;
#define SWITCH_GROUP()                                                                                                 \
    do {                                                                                                               \
        if (!next_group(w, &act)) {                                                                                    \
            if (!w->live) return R_DONE;                                                                               \
            stuck(w, code);                                                                                            \
        }                                                                                                              \
        I = code + w->pc, m = act;                                                                                     \
    } while (0)
    for (;;) {
        while (I->fn) {
            I->fn(w, R, I, m);
            I++;
        }
        switch (I->op) {
        case C_LABEL:
            if (w->ng && I - code >= w->minpc) {
                park(w, (int)(I - code), act, false);
                SWITCH_GROUP();
            }
            b->stats.warp_inst += (u64)I->imm;
            b->stats.fma += (u64)I->k * (u64)__builtin_popcount(act);
            I++;
            break;
        case C_GUARD: {
            u32 p = *(u32 *)(R + I->a);
            m = act & (I->k ? ~p : p);
            I += m ? 1 : I->imm + 1;
            if (!m) m = act;
            break;
        }
        case C_UNGUARD:
            m = act;
            I++;
            break;
        case C_JMP:
        case C_BRA: {
            int to = (int)I->imm, here = (int)(I - code);
            u32 taken = act;
            if (I->op == C_BRA) {
                u32 p = *(u32 *)(R + I->a);
                taken = act & (I->k ? ~p : p);
            }
            u32 stay = act & ~taken;
            if (taken && stay) {
                if (to <= here) park(w, here + 1, stay, false), act = taken;
                else park(w, to, taken, false), act = stay, to = here + 1;
                find_lowest(w);
            } else if (!taken) to = here + 1;
            m = act;
            if (to <= here && (w->waits || --budget <= 0)) {
                park(w, to, act, false);
                return R_YIELD;
            }
            I = code + to;
            if (w->ng && to >= w->minpc) {
                park(w, to, act, false);
                SWITCH_GROUP();
            }
            break;
        }
        case C_EXIT:
            w->live &= ~m, w->exited |= m;
            for (int i = 0; i < w->ng; i++) w->g[i].waits = false; /* they may have waited for these */
            act &= ~m;
            if (act) { /* a guarded exit */
                m = act;
                I++;
                break;
            }
            SWITCH_GROUP();
            break;
        case C_CONVERGE: {
            u32 need = w->live;
            if (I->a >= 0) {
                const u32 *mask = (const u32 *)(R + I->a);
                need &= mask[__builtin_ctz(m)];
                if (!(mask[__builtin_ctz(m)] >> __builtin_ctz(m) & 1))
                    finding(w, I, m, "the member mask %08x does not name the lane that executes the instruction", mask[__builtin_ctz(m)]);
            }
            if (need & ~act) {
                int here = (int)(I - code), kept = 0;
                for (int i = 0; i < w->ng; i++) {
                    if (w->g[i].pc == here) act |= w->g[i].mask;
                    else w->g[kept++] = w->g[i];
                }
                w->ng = kept;
                if (need & ~act) {
                    if (m != act && (m & ~act)) finding(w, I, m, "a predicated instruction of the whole warp is not executed by all its lanes");
                    park(w, here, act, true);
                    SWITCH_GROUP();
                    break;
                }
                find_lowest(w);
                m = act;
            }
            if (need & ~m) finding(w, I, m, "lanes %08x take no part in an instruction that needs them", need & ~m);
            I++;
            break;
        }
        case C_BAR: {
            u32 first = (u32)__builtin_ctz(m);
            w->bar = I;
            w->bar_id = (int)((u32 *)(R + I->a))[first] & 15;
            w->bar_count = I->b >= 0 ? (int)((u32 *)(R + I->b))[first] : 0;
            if (w->bar_count % WARP) finding(w, I, m, "a barrier for %d threads, which is not a multiple of the warp size", w->bar_count);
            if ((I->k & 15) >= 2) {
                u32 p = *(u32 *)(R + I->c);
                if (I->k & 16) p = ~p;
                b->red_true[w->bar_id] += __builtin_popcount(p & m), b->red_count[w->bar_id] += __builtin_popcount(m);
            }
            if ((I->k & 15) == 1) { /* arrives, and goes on */
                b->arrived[w->bar_id] += WARP, b->expected[w->bar_id] = w->bar_count;
                b->no_races = true;
                I++;
                break;
            }
            park(w, (int)(I - code) + 1, act, false);
            w->active = m;
            return R_BARRIER;
        }
        case C_TRAP:
            finding(w, I, m, "trap");
        default:
            finding(w, I, m, "this instruction is not emulated");
        }
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------- */
static u64 random64(u64 *s) { /* splitmix64 */
    u64 z = (*s += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static void broadcast(char *at, int bytes, u64 v) {
    if (bytes == 8) for (int l = 0; l < WARP; l++) ((u64 *)at)[l] = v;
    else if (bytes == 4) for (int l = 0; l < WARP; l++) ((u32 *)at)[l] = (u32)v;
    else if (bytes == 2) for (int l = 0; l < WARP; l++) ((u16 *)at)[l] = (u16)v;
    else *(u32 *)at = (u32)v;
}

static void *bytes_for(void *p, size_t *have, size_t want) {
    if (*have >= want) return p;
    free(p);
    *have = want;
    return aligned_alloc(64, (want + 63) / 64 * 64);
}

/* registers that hold the same for every block of the launch */
static void prepare(Block *b) {
    Launch *L = b->launch;
    Func *f = L->f;
    b->nthreads = (int)(L->block[0] * L->block[1] * L->block[2]);
    b->nwarps = (b->nthreads + WARP - 1) / WARP;
    size_t per = ((size_t)f->reg_bytes + 127) / 64 * 64, local = (size_t)f->local_bytes * WARP;
    b->regs = bytes_for(b->regs, &b->regs_bytes, per * (size_t)b->nwarps);
    b->local = bytes_for(b->local, &b->local_bytes, local * (size_t)b->nwarps + 64);
    b->shared_bytes = (u32)((f->shared_bytes + 15) / 16 * 16) + L->shared;
    if (!L->shared) b->shared_bytes = (u32)f->shared_bytes;
    if (b->shared_cap < b->shared_bytes) {
        free(b->shared);
        b->shared_cap = b->shared_bytes;
        b->shared = aligned_alloc(64, ((size_t)b->shared_cap + 64) / 64 * 64 * 4);
        size_t step = ((size_t)b->shared_cap + 64) / 64 * 64;
        b->writer = b->shared + step, b->reader = b->writer + step, b->init = b->reader + step;
    }
    memset(b->cached, 0, sizeof b->cached);
    for (int i = 0; i < b->nwarps; i++) {
        Warp *w = &b->warps[i];
        w->block = b, w->id = i, w->regs = b->regs + per * (size_t)i, w->local = b->local + local * (size_t)i;
        w->lanes = b->nthreads - i * WARP < WARP ? b->nthreads - i * WARP : WARP;
        for (int j = 0; j < f->nconsts; j++) broadcast(w->regs + f->consts[j].offset, f->consts[j].bytes, f->consts[j].value);
        for (int j = 0; j < f->nspecials; j++) {
            u32 *d = (u32 *)(w->regs + f->specials[j].offset);
            for (u32 l = 0; l < WARP; l++) {
                u32 t = (u32)i * WARP + l, v = 0;
                switch (f->specials[j].which) {
                case S_TIDX: v = t % L->block[0]; break;
                case S_TIDY: v = t / L->block[0] % L->block[1]; break;
                case S_TIDZ: v = t / (L->block[0] * L->block[1]); break;
                case S_NTIDX: case S_NTIDY: case S_NTIDZ: v = L->block[f->specials[j].which - S_NTIDX]; break;
                case S_NCTAIDX: case S_NCTAIDY: case S_NCTAIDZ: v = L->grid[f->specials[j].which - S_NCTAIDX]; break;
                case S_LANEID: v = l; break;
                case S_WARPID: v = (u32)i; break;
                case S_NWARPID: v = (u32)b->nwarps; break;
                case S_NSMID: v = 132; break;
                case S_LANEMASK_EQ: v = 1u << l; break;
                case S_LANEMASK_LT: v = (1u << l) - 1; break;
                case S_LANEMASK_LE: v = (2u << l) - 1; break;
                case S_LANEMASK_GT: v = ~((2u << l) - 1); break;
                case S_LANEMASK_GE: v = ~((1u << l) - 1); break;
                case S_DYNSMEM: v = (u32)((f->shared_bytes + 15) / 16 * 16); break;
                case S_TOTSMEM: v = L->shared; break;
                }
                d[l] = v;
            }
        }
    }
}

static void release(Block *b, int id) { /* all have come: the warps at this barrier go on */
    for (int i = 0; i < b->nwarps; i++) {
        Warp *w = &b->warps[i];
        if (w->state != AT_BARRIER || w->bar_id != id) continue;
        int kind = w->bar->k & 15, t = b->red_true[id], n = b->red_count[id];
        u32 m = w->active;
        if (kind == 2) {
            u32 *d = (u32 *)(w->regs + w->bar->d);
            for (int l = 0; l < WARP; l++) if (m >> l & 1) d[l] = (u32)t;
        } else if (kind > 2) {
            u32 *d = (u32 *)(w->regs + w->bar->d);
            *d = (*d & ~m) | ((kind == 3 ? t == n : t > 0) ? m : 0);
        }
        w->state = READY;
    }
    b->arrived[id] = b->red_true[id] = b->red_count[id] = b->expected[id] = 0;
}

static void clear_races(Block *b) {
    if (b->dirty_hi > b->dirty_lo) {
        memset(b->writer + b->dirty_lo, 0, b->dirty_hi - b->dirty_lo);
        memset(b->reader + b->dirty_lo, 0, b->dirty_hi - b->dirty_lo);
    }
    b->dirty_lo = UINT32_MAX, b->dirty_hi = 0;
}

static void run_block(Block *b, u64 index) {
    Launch *L = b->launch;
    Func *f = L->f;
    b->id[0] = (u32)(index % L->grid[0]), b->id[1] = (u32)(index / L->grid[0] % L->grid[1]), b->id[2] = (u32)(index / L->grid[0] / L->grid[1]);
    if (b->shared_bytes) {
        memset(b->init, 0, b->shared_bytes), memset(b->writer, 0, b->shared_bytes), memset(b->reader, 0, b->shared_bytes);
        b->dirty_lo = UINT32_MAX, b->dirty_hi = 0;
    }
    b->no_races = false, b->yields = 0, b->events = 0, b->idle = 0;
    memset(b->arrived, 0, sizeof b->arrived), memset(b->expected, 0, sizeof b->expected);
    memset(b->red_true, 0, sizeof b->red_true), memset(b->red_count, 0, sizeof b->red_count);
    for (int i = 0; i < b->nwarps; i++) {
        Warp *w = &b->warps[i];
        w->live = w->lanes == WARP ? ~0u : (1u << w->lanes) - 1;
        w->exited = 0, w->ng = 0, w->state = READY, w->ncopies = 0, w->group = 0;
        park(w, 0, w->live, false);
        for (int j = 0; j < f->nspecials; j++) {
            int s = f->specials[j].which;
            if (s >= S_CTAIDX && s <= S_CTAIDZ) broadcast(w->regs + f->specials[j].offset, 4, b->id[s - S_CTAIDX]);
            else if (s == S_SMID) broadcast(w->regs + f->specials[j].offset, 4, index % 132);
        }
    }
    int done = 0, order[MAX_WARPS];
    for (int i = 0; i < b->nwarps; i++) order[i] = i;
    if (settings.shuffle) {
        u64 s = L->seed ^ (index * 0x9e3779b97f4a7c15ull);
        for (int i = b->nwarps - 1; i > 0; i--) {
            int j = (int)(random64(&s) % (u64)(i + 1)), t = order[i];
            order[i] = order[j], order[j] = t;
        }
    }
    while (done < b->nwarps) {
        bool progress = false, all_wait = true;
        u64 events = b->events;
        for (int i = 0; i < b->nwarps; i++) {
            Warp *w = &b->warps[order[i]];
            if (w->state != READY) continue;
            progress = true;
            if (atomic_load_explicit(&L->error, memory_order_relaxed)) longjmp(b->out, 1);
            switch (run(w)) {
            case R_DONE:
                all_wait = false;
                w->state = DONE, done++;
                break;
            case R_BARRIER:
                all_wait = false;
                w->state = AT_BARRIER;
                b->arrived[w->bar_id] += w->bar_count ? WARP : w->lanes;
                if (w->exited)
                    finding(w, w->bar, w->exited, "lanes %08x ended without coming to the barrier that the others wait at", w->exited);
                if (w->bar_count && w->bar_count < b->nwarps * WARP) b->no_races = true;
                int want = w->bar_count ? w->bar_count : b->nthreads;
                if (b->arrived[w->bar_id] >= want) {
                    if (want >= b->nthreads) clear_races(b), b->no_races = false;
                    release(b, w->bar_id);
                }
                break;
            case R_YIELD:
                if (w->waits) continue;
                all_wait = false;
                if (++b->yields > LIMIT / SLICE)
                    finding(w, &f->code[w->g[0].pc], w->g[0].mask, "the block does not end: it has taken %ld branches back", (long)LIMIT);
                break;
            }
        }
        b->idle = progress && all_wait && events == b->events ? b->idle + 1 : 0;
        if (b->idle > PATIENCE)
            for (int i = 0; i < b->nwarps; i++) {
                Warp *w = &b->warps[i];
                if (w->state == READY) mbar_never(w, &f->code[w->g[0].pc], w->g[0].mask);
            }
        if (!progress) { /* all that are not done wait at barriers */
            for (int i = 0; i < b->nwarps; i++) {
                Warp *w = &b->warps[i];
                if (w->state != AT_BARRIER) continue;
                int missing = -1;
                for (int j = 0; j < b->nwarps; j++)
                    if (b->warps[j].state == DONE || b->warps[j].bar_id != w->bar_id) missing = j;
                if (missing >= 0 && b->warps[missing].state == DONE)
                    finding(w, w->bar, w->active, "waits at barrier %d, and warp %d (threads %d to %d) has ended without coming to it", w->bar_id, missing,
                            missing * WARP, missing * WARP + b->warps[missing].lanes - 1);
                if (missing >= 0)
                    finding(w, w->bar, w->active, "waits at barrier %d, and warp %d waits at barrier %d", w->bar_id, missing, b->warps[missing].bar_id);
                finding(w, w->bar, w->active, "waits at barrier %d for %d threads, of which %d come", w->bar_id,
                        w->bar_count ? w->bar_count : b->nthreads, b->arrived[w->bar_id]);
            }
        }
    }
}

static void work(Block *b) {
    Launch *L = b->launch;
    if (setjmp(b->out)) return;
    for (;;) {
        u64 i = atomic_fetch_add(&L->next, 1);
        if (i >= L->nblocks || atomic_load_explicit(&L->error, memory_order_relaxed)) return;
        run_block(b, L->order ? L->order[i] : i);
    }
}

/* ---- workers: one helper thread beside the caller's -------------------------------------------------------------- */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;   /* who has the helper */
static pthread_mutex_t job_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_there = PTHREAD_COND_INITIALIZER, job_done = PTHREAD_COND_INITIALIZER;
static Launch *job;
static bool job_busy, helper_started;
static pid_t helper_pid;
static _Thread_local Block *own;
static Block helper_block;

#include <unistd.h>
static void *helper(void *unused) {
    (void)unused;
    pthread_mutex_lock(&job_lock);
    for (;;) {
        while (!job) pthread_cond_wait(&job_there, &job_lock);
        helper_block.launch = job;
        job = NULL;
        pthread_mutex_unlock(&job_lock);
        memset(&helper_block.stats, 0, sizeof helper_block.stats);
        prepare(&helper_block);
        work(&helper_block);
        pthread_mutex_lock(&job_lock);
        job_busy = false;
        pthread_cond_signal(&job_done);
    }
    return NULL;
}

static void add_stats(Stats *a, const Stats *b) {
    a->warp_inst += b->warp_inst, a->fma += b->fma, a->mma += b->mma;
    a->load_bytes += b->load_bytes, a->load_sectors += b->load_sectors;
    a->store_bytes += b->store_bytes, a->store_sectors += b->store_sectors;
    a->shared_access += b->shared_access, a->shared_extra += b->shared_extra;
}

int exec_launch(Launch *L) {
    static _Atomic u64 serial;
    if (!own) own = calloc(1, sizeof *own);
    L->nblocks = (u64)L->grid[0] * L->grid[1] * L->grid[2];
    if (settings.shuffle) {
        L->seed = settings.seed * 0x2545f4914f6cdd1dull + atomic_fetch_add(&serial, 1);
        L->order = malloc(sizeof *L->order * (size_t)L->nblocks);
        u64 s = L->seed;
        for (u64 i = 0; i < L->nblocks; i++) L->order[i] = (u32)i;
        for (u64 i = L->nblocks - 1; i > 0; i--) {
            u64 j = random64(&s) % (i + 1);
            u32 t = L->order[i];
            L->order[i] = L->order[j], L->order[j] = t;
        }
    }
    own->launch = L;
    memset(&own->stats, 0, sizeof own->stats);
    bool helped = false;
    if (settings.threads > 1 && L->nblocks > 3 && !pthread_mutex_trylock(&pool_lock)) {
        pthread_mutex_lock(&job_lock);
        if (!helper_started || helper_pid != getpid()) {
            pthread_t t;
            helper_started = !pthread_create(&t, NULL, helper, NULL);
            helper_pid = getpid();
        }
        if (helper_started) job = L, job_busy = helped = true, pthread_cond_signal(&job_there);
        pthread_mutex_unlock(&job_lock);
        if (!helped) pthread_mutex_unlock(&pool_lock);
    }
    prepare(own);
    work(own);
    if (helped) {
        pthread_mutex_lock(&job_lock);
        while (job_busy) pthread_cond_wait(&job_done, &job_lock);
        pthread_mutex_unlock(&job_lock);
    }
    Func *f = L->f;
    pthread_mutex_lock(&f->lock);
    f->stats.launches++;
    for (int i = 0; i < 3; i++) f->stats.grid[i] = L->grid[i], f->stats.block[i] = L->block[i];
    add_stats(&f->stats, &own->stats);
    if (helped) add_stats(&f->stats, &helper_block.stats);
    pthread_mutex_unlock(&f->lock);
    if (helped) pthread_mutex_unlock(&pool_lock);
    free(L->order);
    return atomic_load(&L->error);
}
