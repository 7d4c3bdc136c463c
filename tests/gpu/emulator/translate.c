/* Turns one PTX statement into instructions for the interpreter, and puts registers into a warp's register file. */
#include <ctype.h>

#include "ptx.h"

/* ---- building -------------------------------------------------------------------------------------------------- */
int new_reg(Compiler *c, int bytes) {
    GROW(c->regs, c->nregs, c->capregs);
    c->regs[c->nregs] = (VReg){.bytes = bytes, .offset = -1};
    return c->nregs++;
}
int constant(Compiler *c, int bytes, u64 value) {
    if (bytes && bytes < 8) value &= (1ull << (8 * bytes)) - 1;
    if (!bytes) value = value ? ~0u : 0;
    for (int i = 0; i < c->nregs; i++)
        if (c->regs[i].constant && c->regs[i].bytes == bytes && c->regs[i].value == value) return i;
    int r = new_reg(c, bytes);
    c->regs[r].constant = true, c->regs[r].value = value;
    return r;
}
static int special(Compiler *c, int bytes, int which) {
    for (int i = 0; i < c->nregs; i++)
        if (c->regs[i].special && c->regs[i].bytes == bytes && (int)c->regs[i].value == which) return i;
    int r = new_reg(c, bytes);
    c->regs[r].special = true, c->regs[r].value = (u64)which;
    return r;
}
static const char *specials[S_COUNT] = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x",
    "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%lanemask_eq",
    "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%clock", "%clock64", "%globaltimer",
    "%dynamic_smem_start", "%dynamic_smem_size"};
int special_index(const char *name) {
    for (int i = 0; i < S_COUNT; i++)
        if (!strcmp(specials[i], name)) return i;
    return -1;
}

static int emit(Compiler *c, Fn fn) {
    Func *f = c->f;
    GROW(f->code, f->n, f->cap);
    f->code[f->n] = (Inst){.fn = fn, .line = c->line, .d = -1, .a = -1, .b = -1, .c = -1};
    return f->n++;
}
int emit_control(Compiler *c, int op, s64 imm) {
    int i = emit(c, NULL);
    c->f->code[i].op = (u16)op, c->f->code[i].imm = imm;
    return i;
}
/* field: 0 d, 1 a, 2 b, 3 c, 4 an entry of vec */
static void ref(Compiler *c, int inst, int field, int vec, int reg, bool def) {
    GROW(c->refs, c->nrefs, c->caprefs);
    c->refs[c->nrefs++] = (Ref){inst, field, vec, reg, def};
}
static int add_vec(Compiler *c, int inst, int reg, bool def) { /* reg < 0: stays -1 */
    GROW(c->f->vec, c->f->nvec, c->capvec);
    c->f->vec[c->f->nvec] = -1;
    if (reg >= 0) ref(c, inst, 4, c->f->nvec, reg, def);
    return c->f->nvec++;
}
static int add_vec_value(Compiler *c, s32 value) {
    GROW(c->f->vec, c->f->nvec, c->capvec);
    c->f->vec[c->f->nvec] = value;
    return c->f->nvec++;
}

const OpInfo *find_op(const char *name) {
    static const OpInfo *const tables[] = {ops_int, ops_float, ops_convert};
    static const OpInfo *hash[4096];
    static bool ready;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!ready) {
        for (int t = 0; t < 3; t++)
            for (const OpInfo *o = tables[t]; o->name; o++) {
                u32 h = 2166136261u;
                for (const char *s = o->name; *s; s++) h = (h ^ (u8)*s) * 16777619u;
                while (hash[h & 4095]) h++;
                hash[h & 4095] = o;
            }
        ready = true;
    }
    pthread_mutex_unlock(&lock);
    u32 h = 2166136261u;
    for (const char *s = name; *s; s++) h = (h ^ (u8)*s) * 16777619u;
    for (; hash[h & 4095]; h++)
        if (!strcmp(hash[h & 4095]->name, name)) return hash[h & 4095];
    return NULL;
}

int op3(Compiler *c, const char *name, int d, int a, int b, int cc) {
    const OpInfo *o = find_op(name);
    if (!o) {
        fprintf(stderr, "[emulated GPU] internal: no operation %s\n", name);
        abort();
    }
    int i = emit(c, o->fn);
    if (d >= 0) ref(c, i, 0, 0, d, true);
    if (a >= 0) ref(c, i, 1, 0, a, false);
    if (b >= 0) ref(c, i, 2, 0, b, false);
    if (cc >= 0) ref(c, i, 3, 0, cc, false);
    return i;
}

void emit_unknown(Compiler *c, const Stmt *s) {
    if (settings.verbose) fprintf(stderr, "[emulated GPU] %s: line %d is not emulated: %s\n", c->f->name, s->line, s->op);
    emit_control(c, C_UNKNOWN, 0);
}

/* ---- operands --------------------------------------------------------------------------------------------------- */
static int size_code(int bytes) { return bytes == 8 ? 3 : bytes == 4 ? 2 : bytes == 2 ? 1 : 0; }

int convert_int(Compiler *c, int reg, const char *type, int to) { /* type: how the source is read */
    char name[40];
    int d = new_reg(c, to);
    snprintf(name, sizeof name, "icvt_%d_%s_%d", to, type, c->regs[reg].bytes);
    op3(c, name, d, reg, -1, -1);
    return d;
}
static const char *unsigned_type(int bytes) { return bytes == 8 ? "u64" : bytes == 4 ? "u32" : bytes == 2 ? "u16" : "u8"; }

/* the register that has the operand's value, of `bytes` bytes (0: predicate); -1 if it has none */
int source(Compiler *c, const Opd *o, int bytes) {
    int r = -1;
    switch (o->kind) {
    case O_REG:
        r = o->reg;
        break;
    case O_IMM: {
        u64 v = o->value;
        if (o->real == 64 && bytes == 4) {
            double x;
            memcpy(&x, &v, 8);
            float y = (float)x;
            u32 b;
            memcpy(&b, &y, 4), v = b;
        }
        return constant(c, bytes, v);
    }
    case O_SPECIAL:
        r = special(c, o->n == S_CLOCK64 || o->n == S_GLOBALTIMER || o->n == S_GRIDID ? 8 : 4, o->n);
        if (o->n == S_CLOCK || o->n == S_CLOCK64 || o->n == S_GLOBALTIMER) { /* read anew each time */
            int d = new_reg(c, c->regs[r].bytes), i = emit(c, op_clock);
            c->f->code[i].k = (u16)c->regs[d].bytes;
            ref(c, i, 0, 0, d, true);
            r = d;
        }
        break;
    case O_SYM:
        if (o->sym->dynamic) r = special(c, 4, S_DYNSMEM);
        else return constant(c, bytes, o->sym->address + (u64)o->offset);
        break;
    default:
        return -1;
    }
    if (c->regs[r].bytes == bytes) return r;
    if (!bytes || !c->regs[r].bytes) return -1;
    return convert_int(c, r, unsigned_type(c->regs[r].bytes), bytes);
}

bool has(const Stmt *s, const char *part) {
    for (int i = 1; i < s->nparts; i++)
        if (!strcmp(s->part[i], part)) return true;
    return false;
}
bool is(const Stmt *s, const char *base) { return !strcmp(s->part[0], base); }
bool is_type(const char *t) {
    static const char *const types[] = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "b8", "b16", "b32", "b64", "b128", "f16",
                                        "f16x2", "bf16", "bf16x2", "tf32", "f32", "f64", "pred", "e4m3x2", "e5m2x2", NULL};
    for (int i = 0; types[i]; i++)
        if (!strcmp(types[i], t)) return true;
    return false;
}
const char *type_of(const Stmt *s) {
    for (int i = s->nparts - 1; i > 0; i--)
        if (is_type(s->part[i])) return s->part[i];
    return "";
}
int space_of(const Stmt *s) {
    for (int i = 1; i < s->nparts; i++) {
        const char *p = s->part[i];
        if (!strcmp(p, "global") || !strcmp(p, "const")) return GLOBAL;
        if (!strncmp(p, "shared", 6)) return SHARED;
        if (!strcmp(p, "local")) return LOCAL;
        if (!strncmp(p, "param", 5)) return PARAM;
    }
    return GENERIC;
}

/* ---- instructions ------------------------------------------------------------------------------------------------ */
static void address(Compiler *c, int inst, int field, const Opd *o, u16 *k, s64 *imm) {
    const Opd *base = &o->sub[0];
    int r;
    *imm = o->offset;
    if (base->kind == O_IMM) r = constant(c, 8, 0);
    else if (base->kind == O_SYM && !base->sym->dynamic) r = constant(c, 8, base->sym->address + (u64)base->offset);
    else if (base->kind == O_REG) r = base->reg;
    else r = special(c, 4, S_DYNSMEM);
    if (c->regs[r].bytes == 4) *k |= 1 << 12;
    ref(c, inst, field, 0, r, false);
}

static int vector_size(const Stmt *s) { return has(s, "v2") ? 2 : has(s, "v4") ? 4 : has(s, "v8") ? 8 : 1; }

static bool load_store(Compiler *c, Stmt *s, bool load) {
    const char *type = type_of(s);
    int e = type_bytes(type), n = vector_size(s), where = space_of(s);
    Opd *value = &s->opd[load ? 0 : 1], *at = &s->opd[load ? 1 : 0];
    if (e == 16 || !e || at->kind != O_ADDR || (value->kind == O_VEC && value->n != n)) return false;
    int regs[8];
    for (int i = 0; i < n; i++) {
        Opd *v = value->kind == O_VEC ? &value->sub[i] : value;
        if (v->kind == O_SINK) regs[i] = -1;
        else if (load) regs[i] = v->reg;
        else regs[i] = source(c, v, v->kind == O_REG ? c->regs[v->reg].bytes : e == 1 ? 2 : e);
        if (regs[i] < 0 && v->kind != O_SINK) return false;
    }
    int rb = 4;
    for (int i = 0; i < n; i++)
        if (regs[i] >= 0) rb = c->regs[regs[i]].bytes;
    u16 k = (u16)(n | size_code(e) << 4 | size_code(rb) << 6 | (type[0] == 's') << 8 | where << 9);
    int i;
    if (where == PARAM && at->sub[0].kind == O_SYM && at->sub[0].sym->space == LOCAL) { /* of a call, see ptx.c */
        where = LOCAL;
        k = (u16)((k & ~(7 << 9)) | LOCAL << 9);
    }
    if (where == PARAM && (!load || (at->sub[0].kind == O_SYM && at->sub[0].sym->space != PARAM))) return false;
    if (where == PARAM && at->sub[0].kind == O_SYM) {
        i = emit(c, op_ld_param);
        c->f->code[i].imm = (s64)at->sub[0].sym->address + at->sub[0].offset + at->offset;
    } else {
        s64 imm;
        i = emit(c, load ? op_ld : op_st);
        address(c, i, 1, at, &k, &imm);
        c->f->code[i].imm = imm;
    }
    c->f->code[i].k = k;
    for (int j = 0; j < n; j++) {
        int v = add_vec(c, i, regs[j], load);
        if (!j) c->f->code[i].d = v;
    }
    return true;
}

static bool atomic(Compiler *c, Stmt *s) {
    static const char *const kinds[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    bool red = is(s, "red");
    const char *type = type_of(s);
    int e = type_bytes(type), kind = -1;
    for (int j = 0; j < 10; j++)
        if (has(s, kinds[j])) kind = j;
    Opd *at = &s->opd[red ? 0 : 1], *v = at + 1;
    if (kind < 0 || vector_size(s) > 1 || e > 8 || e < 2 || at->kind != O_ADDR) return false;
    int t = type[0] == 's' ? E_S : !strncmp(type, "bf", 2) ? E_BF : !strncmp(type, "f16", 3) ? E_H : type[0] == 'f' ? E_F : E_U;
    u16 k = (u16)(kind | t << 4 | size_code(e) << 7 | space_of(s) << 9);
    int b = source(c, v, e), cc = kind == A_CAS ? source(c, v + 1, e) : -1;
    if (b < 0) return false;
    int i = emit(c, op_atom);
    s64 imm;
    address(c, i, 1, at, &k, &imm);
    ref(c, i, 2, 0, b, false);
    if (cc >= 0) ref(c, i, 3, 0, cc, false);
    if (!red && s->opd[0].kind == O_REG) {
        if (c->regs[s->opd[0].reg].bytes != e) return false;
        k |= 1 << 13;
        ref(c, i, 0, 0, s->opd[0].reg, true);
    }
    c->f->code[i].imm = imm, c->f->code[i].k = k;
    return true;
}

/* all lanes that `mask` names have to be here before the instruction is executed */
static void converge(Compiler *c, int mask) {
    int i = emit_control(c, C_CONVERGE, 0);
    if (mask >= 0) ref(c, i, 1, 0, mask, false);
}

static bool warp_op(Compiler *c, Stmt *s) {
    int i;
    if (is(s, "shfl")) {
        Opd *o = s->opd;
        int mode = has(s, "up") ? 0 : has(s, "down") ? 1 : has(s, "bfly") ? 2 : has(s, "idx") ? 3 : -1;
        bool sync = has(s, "sync");
        int mask = sync ? source(c, &o[4], 4) : -1;
        int a = source(c, &o[1], 4), b = source(c, &o[2], 4), cc = source(c, &o[3], 4);
        if (mode < 0 || o[0].kind != O_REG || a < 0 || b < 0 || cc < 0) return false;
        converge(c, mask);
        i = emit(c, op_shfl);
        c->f->code[i].k = (u16)mode;
        ref(c, i, 0, 0, o[0].reg, true), ref(c, i, 1, 0, a, false), ref(c, i, 2, 0, b, false), ref(c, i, 3, 0, cc, false);
        c->f->code[i].imm = add_vec(c, i, o[0].pair, true);
        return true;
    }
    if (is(s, "vote")) {
        int mode = has(s, "all") ? 0 : has(s, "any") ? 1 : has(s, "uni") ? 2 : has(s, "ballot") ? 3 : -1;
        int mask = has(s, "sync") ? source(c, &s->opd[2], 4) : -1;
        int p = source(c, &s->opd[1], 0);
        if (mode < 0 || p < 0) return false;
        converge(c, mask);
        i = emit(c, op_vote);
        c->f->code[i].k = (u16)mode, c->f->code[i].imm = s->opd[1].neg;
        ref(c, i, 0, 0, s->opd[0].reg, true), ref(c, i, 1, 0, p, false);
        if (mask >= 0) ref(c, i, 2, 0, mask, false);
        return true;
    }
    if (is(s, "match")) {
        int e = type_bytes(type_of(s)), mask = source(c, &s->opd[2], 4), a = source(c, &s->opd[1], e);
        if (a < 0 || mask < 0) return false;
        converge(c, mask);
        i = emit(c, op_match);
        c->f->code[i].k = (u16)(e | (has(s, "all") ? 16 : 0));
        ref(c, i, 0, 0, s->opd[0].reg, true), ref(c, i, 1, 0, a, false), ref(c, i, 2, 0, mask, false);
        c->f->code[i].imm = add_vec(c, i, s->opd[0].pair, true);
        return true;
    }
    if (is(s, "redux")) {
        static const char *const kinds[] = {"add", "min", "max", "and", "or", "xor"};
        int mask = source(c, &s->opd[2], 4), a = source(c, &s->opd[1], 4), kind = -1;
        for (int j = 0; j < 6; j++)
            if (has(s, kinds[j])) kind = j;
        if (a < 0 || mask < 0 || kind < 0 || type_of(s)[0] == 'f') return false;
        converge(c, mask);
        i = emit(c, op_redux);
        c->f->code[i].k = (u16)(kind | (type_of(s)[0] == 's' ? 16 : 0));
        ref(c, i, 0, 0, s->opd[0].reg, true), ref(c, i, 1, 0, a, false), ref(c, i, 2, 0, mask, false);
        return true;
    }
    if (is(s, "elect")) {
        if (s->opd[0].pair < 0) return false;
        converge(c, source(c, &s->opd[1], 4));
        i = emit(c, op_elect);
        if (s->opd[0].reg >= 0) ref(c, i, 0, 0, s->opd[0].reg, true);
        c->f->code[i].imm = add_vec(c, i, s->opd[0].pair, true);
        return true;
    }
    if (is(s, "activemask")) {
        i = emit(c, op_activemask);
        ref(c, i, 0, 0, s->opd[0].reg, true);
        return true;
    }
    return false;
}

static bool matrix(Compiler *c, Stmt *s) {
    if (is(s, "ldmatrix")) {
        int n = has(s, "x4") ? 4 : has(s, "x2") ? 2 : 1;
        if (!has(s, "m8n8") || !has(s, "b16") || s->opd[1].kind != O_ADDR || (s->opd[0].kind == O_VEC && s->opd[0].n != n)) return false;
        converge(c, -1);
        int i = emit(c, op_ldmatrix);
        u16 k = (u16)(n | (has(s, "trans") ? 16 : 0));
        s64 imm;
        address(c, i, 1, &s->opd[1], &k, &imm);
        c->f->code[i].imm = imm, c->f->code[i].k = k;
        for (int j = 0; j < n; j++) {
            Opd *o = s->opd[0].kind == O_VEC ? &s->opd[0].sub[j] : &s->opd[0];
            int v = add_vec(c, i, o->reg, true);
            if (!j) c->f->code[i].d = v;
        }
        return true;
    }
    if (is(s, "stmatrix")) {
        int n = has(s, "x4") ? 4 : has(s, "x2") ? 2 : 1;
        if (!has(s, "m8n8") || !has(s, "b16") || s->opd[0].kind != O_ADDR || (s->opd[1].kind == O_VEC && s->opd[1].n != n)) return false;
        int regs[4];
        for (int j = 0; j < n; j++)
            if ((regs[j] = source(c, s->opd[1].kind == O_VEC ? &s->opd[1].sub[j] : &s->opd[1], 4)) < 0) return false;
        converge(c, -1);
        int i = emit(c, op_stmatrix);
        u16 k = (u16)(n | (has(s, "trans") ? 16 : 0));
        s64 imm;
        address(c, i, 1, &s->opd[0], &k, &imm);
        c->f->code[i].imm = imm, c->f->code[i].k = k;
        for (int j = 0; j < n; j++) {
            int v = add_vec(c, i, regs[j], false);
            if (!j) c->f->code[i].d = v;
        }
        return true;
    }
    /* mma.sync.aligned.shape.row.col.d.a.b.c */
    const char *t[4];
    int nt = 0, k;
    for (int j = 1; j < s->nparts; j++)
        if (is_type(s->part[j]) && nt < 4) t[nt++] = s->part[j];
    bool half = nt == 4 && (!strcmp(t[1], "f16") || !strcmp(t[1], "bf16")), tf = nt == 4 && !strcmp(t[1], "tf32");
    if (!has(s, "row") || !has(s, "col") || nt != 4 || strcmp(t[0], "f32") || strcmp(t[3], "f32") || strcmp(t[1], t[2])) return false;
    if (has(s, "m16n8k16") && half) k = 16;
    else if (has(s, "m16n8k8") && (half || tf)) k = 8;
    else if (has(s, "m16n8k4") && tf) k = 4;
    else return false;
    int na = half ? k / 4 : k / 2, nb = na / 2;
    int counts[4] = {4, na, nb, 4}, regs[14], n = 0;
    for (int j = 0; j < 4; j++) {
        if (s->opd[j].kind != O_VEC || s->opd[j].n != counts[j]) {
            if (!(counts[j] == 1 && s->opd[j].kind == O_REG)) return false;
        }
        for (int q = 0; q < counts[j]; q++) {
            int r = source(c, s->opd[j].kind == O_VEC ? &s->opd[j].sub[q] : &s->opd[j], 4);
            if (r < 0) return false;
            regs[n++] = r;
        }
    }
    converge(c, -1);
    int i = emit(c, half ? op_mma_half : op_mma_tf32);
    c->f->code[i].k = (u16)(k | (!strcmp(t[1], "bf16") ? 64 : 0));
    c->f->code[i].imm = 4 + na + nb; /* where C's registers begin in the list */
    for (int j = 0; j < n; j++) {
        int v = add_vec(c, i, regs[j], j < 4);
        if (!j) c->f->code[i].d = v;
    }
    return true;
}

static bool cp_async(Compiler *c, Stmt *s) {
    if (has(s, "commit_group")) emit(c, op_cp_commit);
    else if (has(s, "wait_group") || has(s, "wait_all")) {
        int i = emit(c, op_cp_wait);
        c->f->code[i].imm = has(s, "wait_all") ? -1 : (s64)s->opd[0].value;
    } else if ((has(s, "ca") || has(s, "cg")) && !has(s, "bulk")) {
        Opd *to = &s->opd[0], *from = &s->opd[1];
        if (to->kind != O_ADDR || from->kind != O_ADDR || s->opd[2].kind != O_IMM || s->n > 4) return false;
        int size = -1;
        if (s->n == 4 && s->opd[3].kind != O_NONE) {
            if (has(s, "cache_hint") || has(s, "L2::cache_hint")) size = -1;
            else if ((size = source(c, &s->opd[3], 4)) < 0) return false;
        }
        int i = emit(c, op_cp_async);
        u16 kt = 0, kf = 0;
        s64 it, iff;
        int dst = to->sub[0].kind == O_REG ? to->sub[0].reg : to->sub[0].kind == O_SYM && !to->sub[0].sym->dynamic
                ? constant(c, 8, to->sub[0].sym->address) : special(c, 4, S_DYNSMEM);
        it = to->offset, iff = from->offset;
        if (c->regs[dst].bytes == 4) kt = 1;
        int src = from->sub[0].kind == O_REG ? from->sub[0].reg : -1;
        if (src < 0 || c->regs[src].bytes != 8) return false;
        (void)kf;
        c->f->code[i].k = (u16)(kt | (has(s, "global") ? 0 : 2));
        c->f->code[i].imm = (s64)s->opd[2].value;
        if (size >= 0) ref(c, i, 3, 0, size, false);
        c->f->code[i].d = add_vec(c, i, dst, false);
        add_vec_value(c, (s32)it);
        add_vec(c, i, src, false);
        add_vec_value(c, (s32)iff);
    } else return false;
    return true;
}

static bool barrier(Compiler *c, Stmt *s) {
    if (has(s, "warp")) { /* bar.warp.sync mask */
        converge(c, source(c, &s->opd[0], 4));
        return true;
    }
    if (is(s, "barrier") && has(s, "cluster")) return false;
    int kind = has(s, "arrive") ? 1 : has(s, "popc") ? 2 : has(s, "and") ? 3 : has(s, "or") ? 4 : 0, at = kind >= 2 ? 1 : 0;
    int n = s->n - at - (kind >= 2 ? 1 : 0);
    int id = n > 0 ? source(c, &s->opd[at], 4) : constant(c, 4, 0), count = n > 1 ? source(c, &s->opd[at + 1], 4) : -1;
    if (id < 0) return false;
    if (kind != 1) converge(c, -1);
    int p = kind >= 2 ? source(c, &s->opd[s->n - 1], 0) : -1;
    int i = emit_control(c, C_BAR, 0);
    c->f->code[i].k = (u16)(kind | (kind >= 2 && s->opd[s->n - 1].neg ? 16 : 0));
    ref(c, i, 1, 0, id, false);
    if (count >= 0) ref(c, i, 2, 0, count, false);
    if (p >= 0) ref(c, i, 3, 0, p, false);
    if (kind >= 2) ref(c, i, 0, 0, s->opd[0].reg, true);
    return true;
}

/* ---- Hopper: barriers in shared memory, TMA, wgmma (hopper.c) --------------------------------------------------- */
/* the register that has the address [base + offset], with the offset added; -1 if it is none. narrow: it has 32 bits */
static int address_reg(Compiler *c, const Opd *o, bool *narrow) {
    const Opd *base = &o->sub[0];
    if (o->kind != O_ADDR) return -1;
    bool symbol = base->kind == O_SYM, dynamic = symbol && base->sym->dynamic;
    s64 offset = o->offset + (dynamic ? base->offset : 0);
    int r = base->kind == O_REG ? base->reg : !symbol ? -1 : dynamic ? special(c, 4, S_DYNSMEM) : constant(c, 4, base->sym->address + (u64)base->offset);
    if (r < 0) return -1;
    int bytes = c->regs[r].bytes;
    *narrow = bytes == 4;
    if (offset) {
        int sum = new_reg(c, bytes);
        op3(c, *narrow ? "add_b32" : "add_b64", sum, r, constant(c, bytes, (u64)offset), -1);
        r = sum;
    }
    return r;
}

/* init [at], count; inval [at]; arrive state, [at] {, count}; arrive.expect_tx state, [at], bytes;
 * test_wait.parity and try_wait.parity p, [at], parity {, time} */
static bool mbarrier(Compiler *c, Stmt *s) {
    bool narrow, init = has(s, "init"), inval = has(s, "inval"), arrive = has(s, "arrive"), expect = has(s, "expect_tx");
    bool test = (has(s, "try_wait") || has(s, "test_wait")) && has(s, "parity");
    if (!init && !inval && !arrive && !test) return false;
    int place = s->opd[0].kind == O_ADDR ? 0 : 1;
    int at = address_reg(c, &s->opd[place], &narrow);
    if (at < 0) return false;
    bool has_value = s->n > place + 1;
    if (!has_value && (init || expect || test)) return false;
    int value = has_value ? source(c, &s->opd[place + 1], 4) : constant(c, 4, 1);
    if (value < 0) return false;
    int i = emit(c, init ? op_mbar_init : inval ? op_mbar_inval : arrive ? op_mbar_arrive : op_mbar_test);
    c->f->code[i].k = (u16)(narrow | (expect ? 2 : 0));
    ref(c, i, 1, 0, at, false), ref(c, i, 2, 0, value, false);
    if (place == 1 && s->opd[0].kind == O_REG) ref(c, i, 0, 0, s->opd[0].reg, true);
    return !test || s->opd[0].kind == O_REG;
}

/* cp.async.bulk.tensor.Nd.shared::cluster.global.tile.mbarrier::complete_tx::bytes [to], [map, {c..}], [barrier];
 * cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [from], size, [barrier]; */
static bool bulk(Compiler *c, Stmt *s) {
    if (has(s, "commit_group") || has(s, "wait_group")) return true; /* of copies to global memory, which are not emulated */
    if (!has(s, "mbarrier::complete_tx::bytes") || has(s, "multicast::cluster") || has(s, "im2col")) return false;
    bool narrow, narrow_from, tensor = has(s, "tensor");
    int to = address_reg(c, &s->opd[0], &narrow);
    int from = address_reg(c, &s->opd[1], &narrow_from);
    int barrier = address_reg(c, &s->opd[tensor ? 2 : 3], &narrow);
    if (to < 0 || from < 0 || barrier < 0) return false;
    if (narrow_from) from = convert_int(c, from, "u32", 8);
    Opd *list = tensor ? &s->opd[1].sub[1] : &s->opd[2]; /* coordinates, or the number of bytes */
    int regs[5], n = list->kind == O_VEC ? list->n : 1;
    if (n > 5 || (tensor && list->kind != O_VEC)) return false;
    for (int j = 0; j < n; j++)
        if ((regs[j] = source(c, list->kind == O_VEC ? &list->sub[j] : list, 4)) < 0) return false;
    int i = emit(c, tensor ? op_tma : op_bulk);
    c->f->code[i].k = (u16)n;
    ref(c, i, 1, 0, to, false), ref(c, i, 2, 0, from, false), ref(c, i, 3, 0, barrier, false);
    for (int j = 0; j < n; j++) {
        int v = add_vec(c, i, regs[j], false);
        if (!j) c->f->code[i].imm = v;
    }
    return true;
}

/* wgmma.mma_async.sync.aligned.m64nNkK.f32.T.T {sums}, a, b-desc, scale-d, imm-scale-a, imm-scale-b {, imm-trans-a} {, imm-trans-b};
 * a is a descriptor or four registers; only 16-bit types have trans-a (with a descriptor) and trans-b */
static bool wgmma(Compiler *c, Stmt *s) {
    if (!has(s, "mma_async")) { /* fence, commit_group, wait_group: a product is computed when it is issued */
        converge(c, -1);
        return true;
    }
    const char *t[3] = {"", "", ""};
    int nt = 0, n = 0, k = 0, kind = 0;
    for (int j = 1; j < s->nparts; j++) {
        if (is_type(s->part[j]) && nt < 3) t[nt++] = s->part[j];
        if (!strncmp(s->part[j], "m64n", 4)) sscanf(s->part[j], "m64n%dk%d", &n, &k);
    }
    static const char *const kinds[] = {"", "bf16", "f16", "tf32"};
    for (int j = 1; j < 4; j++)
        if (!strcmp(t[1], kinds[j])) kind = j;
    bool tf32 = kind == 3, regs = s->opd[1].kind == O_VEC;
    if (!kind || strcmp(t[0], "f32") || strcmp(t[1], t[2]) || n < 8 || n > 256 || n % 8 || k != (tf32 ? 8 : 16)) return false;
    if (s->opd[0].kind != O_VEC || s->opd[0].n != n / 2 || (regs && s->opd[1].n != 4) || s->n != (tf32 ? 6 : regs ? 7 : 8)) return false;
    bool scaled = s->opd[4].value != 1 || s->opd[5].value != 1;
    bool trans_a = !tf32 && !regs && s->opd[6].value, trans_b = !tf32 && s->opd[regs ? 6 : 7].value;
    int b = source(c, &s->opd[2], 8), add = source(c, &s->opd[3], 0), a[4], na = regs ? 4 : 1;
    if (b < 0 || add < 0 || s->opd[3].neg || scaled) return false;
    for (int j = 0; j < na; j++)
        if ((a[j] = source(c, regs ? &s->opd[1].sub[j] : &s->opd[1], regs ? 4 : 8)) < 0) return false;
    for (int j = 0; j < n / 2; j++)
        if (s->opd[0].sub[j].kind != O_REG) return false;
    converge(c, -1);
    int i = emit(c, op_wgmma);
    c->f->code[i].k = (u16)(kind | regs << 2 | trans_a << 3 | trans_b << 4);
    c->f->code[i].imm = n;
    if (!regs) ref(c, i, 1, 0, a[0], false);
    ref(c, i, 2, 0, b, false), ref(c, i, 3, 0, add, false);
    for (int j = 0; j < n / 2; j++) { /* read and written */
        int v = add_vec(c, i, s->opd[0].sub[j].reg, true);
        ref(c, i, 4, v, s->opd[0].sub[j].reg, false);
        if (!j) c->f->code[i].d = v;
    }
    for (int j = 0; regs && j < 4; j++) add_vec(c, i, a[j], false);
    return true;
}

/* inlined calls and blocks have labels of their own */
char *label_name(Compiler *c, const char *name) {
    char *s = malloc(strlen(name) + 32);
    int scope = 0;
    for (Scope *b = c->scope; b && !scope; b = b->outer)
        for (int i = 0; i < b->n; i++)
            if (!strcmp(b->labels[i], name)) scope = b->number;
    sprintf(s, "%s#%d#%d", name, c->call, scope);
    return s;
}
void emit_jump(Compiler *c, const char *label) {
    int i = emit_control(c, C_JMP, 0);
    GROW(c->fixups, c->nfixups, c->capfixups);
    c->fixups[c->nfixups++] = (Fixup){i, label_name(c, label)};
}

static bool flow(Compiler *c, Stmt *s) {
    if (is(s, "bra") || (is(s, "ret") && c->call)) {
        if (is(s, "bra") && s->opd[0].kind != O_NAME) return false;
        emit_jump(c, is(s, "bra") ? s->opd[0].name : "return");
        if (s->guard >= 0) {
            int i = c->f->n - 1;
            c->f->code[i].op = C_BRA, c->f->code[i].k = s->guard_not;
            ref(c, i, 1, 0, s->guard, false);
        }
        return true;
    }
    if (is(s, "brx")) { /* one comparison after the other */
        int index = source(c, &s->opd[0], 4);
        if (index < 0 || s->opd[1].kind != O_NAME || !c->targets_name || strcmp(c->targets_name, s->opd[1].name)) return false;
        for (int j = 0; j < c->ntargets; j++) {
            int p = new_reg(c, 0);
            op3(c, "setp_eq_b32", p, index, constant(c, 4, (u64)j), -1);
            emit_jump(c, c->targets[j]);
            c->f->code[c->f->n - 1].op = C_BRA;
            ref(c, c->f->n - 1, 1, 0, p, false);
        }
        return emit_control(c, C_TRAP, 0), true;
    }
    int op = is(s, "ret") || is(s, "exit") ? C_EXIT : is(s, "trap") ? C_TRAP : 0;
    if (op) return emit_control(c, op, 0), true;
    return false;
}

static bool nothing(const Stmt *s) {
    static const char *const names[] = {"membar", "fence", "nanosleep", "prefetch", "prefetchu", "griddepcontrol", "applypriority",
                                        "discard", "setmaxnreg", "pmevent", "brkpt", NULL};
    for (int i = 0; names[i]; i++)
        if (is(s, names[i])) return true;
    return false;
}

void translate(Compiler *c, Stmt *s) {
    bool branch = is(s, "bra") || (is(s, "ret") && c->call);
    if (s->guard >= 0 && !branch) { /* the instructions between guard and unguard run for the lanes of the predicate */
        int i = emit_control(c, C_GUARD, 0);
        c->f->code[i].k = s->guard_not;
        ref(c, i, 1, 0, s->guard, false);
    }
    int start = c->f->n;
    bool ok = branch || is(s, "brx") || is(s, "ret") || is(s, "exit") || is(s, "trap") ? flow(c, s)
            : is(s, "ld") || is(s, "ldu") ? load_store(c, s, true)
            : is(s, "st") ? load_store(c, s, false)
            : is(s, "atom") || is(s, "red") ? atomic(c, s)
            : is(s, "shfl") || is(s, "vote") || is(s, "match") || is(s, "redux") || is(s, "activemask") || is(s, "elect") ? warp_op(c, s)
            : is(s, "mma") || is(s, "ldmatrix") || is(s, "stmatrix") ? matrix(c, s)
            : is(s, "wgmma") ? wgmma(c, s)
            : is(s, "mbarrier") ? mbarrier(c, s)
            : is(s, "cp") && has(s, "bulk") ? bulk(c, s)
            : is(s, "cp") ? (has(s, "async") && cp_async(c, s))
            : is(s, "bar") || is(s, "barrier") ? barrier(c, s)
            : is(s, "mov") ? translate_move(c, s)
            : is(s, "cvta") ? translate_cvta(c, s)
            : is(s, "cvt") ? translate_convert(c, s)
            : is(s, "setp") ? translate_compare(c, s)
            : nothing(s) ? true
                         : translate_plain(c, s);
    if (!ok) {
        c->f->n = start;
        int kept = 0;
        for (int i = 0; i < c->nrefs; i++)
            if (c->refs[i].inst < start) c->refs[kept++] = c->refs[i];
        c->nrefs = kept;
        emit_unknown(c, s);
    }
    if (s->guard >= 0 && !branch) {
        emit_control(c, C_UNGUARD, 0);
        for (int i = start - 1, n = c->f->n; i < n; i++)
            if (c->f->code[i].op == C_GUARD && !c->f->code[i].fn) c->f->code[i].imm = n - 1 - i;
    }
}

void emit_label(Compiler *c, const char *name) {
    int i = emit_control(c, C_LABEL, 0);
    GROW(c->labels, c->nlabels, c->caplabels);
    c->labels[c->nlabels++] = (Label){label_name(c, name), i};
}

/* ---- the end of a function -------------------------------------------------------------------------------------- */
void finish(Compiler *c) {
    Func *f = c->f;
    if (!f->n || f->code[f->n - 1].fn || f->code[f->n - 1].op != C_EXIT) emit_control(c, C_EXIT, 0);
    for (int i = 0; i < c->nfixups; i++) {
        Inst *b = &f->code[c->fixups[i].inst];
        b->imm = -1;
        for (int j = 0; j < c->nlabels; j++)
            if (!strcmp(c->labels[j].name, c->fixups[i].name)) b->imm = c->labels[j].at;
        if (b->imm < 0) b->op = C_UNKNOWN;
    }
    place_registers(c);
    for (int i = 0; i < c->nrefs; i++) {
        Ref *r = &c->refs[i];
        s32 o = c->regs[r->reg].offset;
        Inst *x = &f->code[r->inst];
        if (r->field == 0) x->d = o;
        else if (r->field == 1) x->a = o;
        else if (r->field == 2) x->b = o;
        else if (r->field == 3) x->c = o;
        else f->vec[r->vec] = o;
    }
    for (int i = 0; i < c->nregs; i++) {
        VReg *r = &c->regs[i];
        if (r->constant) {
            f->consts = realloc(f->consts, sizeof *f->consts * (size_t)(f->nconsts + 1));
            f->consts[f->nconsts++] = (Const){r->offset, r->bytes, r->value};
        } else if (r->special) {
            f->specials = realloc(f->specials, sizeof *f->specials * (size_t)(f->nspecials + 1));
            f->specials[f->nspecials++] = (Special){r->offset, (s32)r->value};
        }
    }
    /* a label's imm and k: instructions and FMAs from it to the next label */
    for (int i = 0; i < f->n; i++) {
        if (f->code[i].fn || f->code[i].op != C_LABEL) continue;
        int n = 0, fma = 0;
        for (int j = i + 1; j < f->n && (f->code[j].fn || f->code[j].op != C_LABEL); j++) {
            u16 op = f->code[j].op;
            n += f->code[j].fn || op == C_BRA || op == C_JMP || op == C_BAR || op == C_EXIT;
            fma += f->code[j].fn && op == IS_FMA;
        }
        f->code[i].imm = n, f->code[i].k = (u16)fma;
    }
}
