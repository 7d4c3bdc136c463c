/* Statements that only compute: moves, conversions, arithmetic, comparisons. Operations are found by name (ops_*.c). */
#include "ptx.h"

bool translate_move(Compiler *c, Stmt *s) {
    Opd *d = &s->opd[0], *a = &s->opd[1];
    if (!strcmp(type_of(s), "pred")) {
        int p = source(c, a, 0);
        return p >= 0 ? op3(c, "mov_pred", d->reg, p, -1, -1), true : false;
    }
    int bytes = type_bytes(type_of(s));
    char name[32];
    if (bytes == 16) return false;
    if (a->kind == O_VEC) { /* pack */
        int part = bytes / a->n, r[4] = {-1, -1, -1, -1};
        if (a->n > 4 || (a->n & 1) || part < 2) return false;
        for (int j = 0; j < a->n; j++)
            if ((r[j] = a->sub[j].kind == O_SINK ? constant(c, part, 0) : source(c, &a->sub[j], part)) < 0) return false;
        if (a->n == 4) {
            int lo = new_reg(c, 4), hi = new_reg(c, 4);
            op3(c, "pack_b32", lo, r[0], r[1], -1), op3(c, "pack_b32", hi, r[2], r[3], -1);
            r[0] = lo, r[1] = hi;
        }
        snprintf(name, sizeof name, "pack_b%d", bytes * 8);
        op3(c, name, d->reg, r[0], r[1], -1);
        return true;
    }
    int r = source(c, a, bytes);
    if (r < 0) return false;
    if (d->kind == O_VEC) { /* unpack; through copies, as a part may be the source itself */
        int part = bytes / d->n;
        if (part < 2 || d->n > 4) return false;
        for (int j = 0; j < d->n; j++) {
            if (d->sub[j].kind == O_SINK) continue;
            int from = r, width = bytes, first = 0;
            if (d->n == 4) {
                from = new_reg(c, 4), width = 4, first = j / 2 * 2;
                op3(c, j < 2 ? "low_b64" : "high_b64", from, r, -1, -1);
            }
            snprintf(name, sizeof name, "%s_b%d", j - first ? "high" : "low", width * 8);
            op3(c, name, d->sub[j].reg, from, -1, -1);
        }
        return true;
    }
    if (d->kind != O_REG || c->regs[d->reg].bytes != bytes) return false;
    snprintf(name, sizeof name, "mov_b%d", bytes * 8);
    op3(c, name, d->reg, r, -1, -1);
    return true;
}

bool translate_cvta(Compiler *c, Stmt *s) {
    int where = space_of(s);
    int a = source(c, &s->opd[1], 8);
    if (a < 0) return false;
    if (where == GLOBAL || where == PARAM) op3(c, "mov_b64", s->opd[0].reg, a, -1, -1);
    else {
        u64 window = where == SHARED ? shared_window : local_window;
        op3(c, has(s, "to") ? "sub_b64" : "add_b64", s->opd[0].reg, a, constant(c, 8, window), -1);
    }
    return true;
}

bool translate_convert(Compiler *c, Stmt *s) {
    const char *dt = NULL, *st = NULL;
    for (int j = 1; j < s->nparts; j++)
        if (is_type(s->part[j])) {
            if (!dt) dt = s->part[j];
            else st = s->part[j];
        }
    if (!dt || !st || s->opd[0].kind != O_REG) return false;
    int d = s->opd[0].reg, db = c->regs[d].bytes;
    bool dint = dt[0] == 'u' || dt[0] == 's', sint = st[0] == 'u' || st[0] == 's';
    char name[64];
    if (s->n == 3) {
        const char *r = has(s, "relu") ? "relu_" : "";
        snprintf(name, sizeof name, "cvt_%s%s_%s", r, dt, st);
        int a = source(c, &s->opd[1], type_bytes(st)), b = source(c, &s->opd[2], type_bytes(st));
        if (!find_op(name) || has(s, "rz") || a < 0 || b < 0) return false;
        op3(c, name, d, a, b, -1);
        return true;
    }
    if (dint && sint) {
        int a = s->opd[1].kind == O_REG ? s->opd[1].reg : source(c, &s->opd[1], type_bytes(st) < 2 ? 2 : type_bytes(st));
        if (a < 0) return false;
        int dn = type_bytes(dt), sn = type_bytes(st);
        if (has(s, "sat")) { /* clamp in 64 bits */
            if (sn == 8 && (dt[0] != st[0])) return false;
            char t[8];
            snprintf(t, sizeof t, "%s", st);
            int w = convert_int(c, a, t, 8);
            s64 lo = dt[0] == 's' ? -(1ll << (8 * dn - 1)) : 0;
            u64 hi = dt[0] == 's' ? (1ull << (8 * dn - 1)) - 1 : dn == 8 ? ~0ull : (1ull << 8 * dn) - 1;
            int x = new_reg(c, 8), y = new_reg(c, 8);
            if (st[0] == 's') op3(c, "max_s64", x, w, constant(c, 8, (u64)lo), -1), op3(c, "min_s64", y, x, constant(c, 8, hi), -1);
            else op3(c, "min_u64", y, w, constant(c, 8, hi), -1);
            snprintf(name, sizeof name, "icvt_%d_u64_8", db);
            op3(c, name, d, y, -1, -1);
            return true;
        }
        if (dn < db && dn < sn) { /* narrow first, then extend as the target's type says */
            int t = convert_int(c, a, st, dn < 2 ? 2 : dn);
            a = t, st = dt;
        }
        snprintf(name, sizeof name, "icvt_%d_%s_%d", db, st, c->regs[a].bytes);
        if (!find_op(name)) return false;
        op3(c, name, d, a, -1, -1);
        return true;
    }
    if (sint) { /* to float */
        int a = s->opd[1].kind == O_REG ? s->opd[1].reg : source(c, &s->opd[1], type_bytes(st) < 2 ? 2 : type_bytes(st));
        if (a < 0) return false;
        if (has(s, "rz") || has(s, "rm") || has(s, "rp")) return false;
        char wide[4];
        if (type_bytes(st) < 4) {
            a = convert_int(c, a, st, 4);
            snprintf(wide, sizeof wide, "s32");
        } else snprintf(wide, sizeof wide, "%s", st);
        snprintf(name, sizeof name, "cvt_%s_%s", dt, wide);
        if (!find_op(name)) return false;
        op3(c, name, d, a, -1, -1);
        return true;
    }
    int a = source(c, &s->opd[1], type_bytes(st));
    if (a < 0) return false;
    if (has(s, "ftz") && !strcmp(st, "f32")) {
        int t = new_reg(c, 4);
        op3(c, "flush_f32", t, a, -1, -1);
        a = t;
    }
    if (dint) {
        const char *r = has(s, "rni") ? "rni" : has(s, "rmi") ? "rmi" : has(s, "rpi") ? "rpi" : "rzi";
        if (!strcmp(st, "f16") || !strcmp(st, "bf16")) {
            int t = new_reg(c, 4);
            snprintf(name, sizeof name, "cvt_f32_%s", st);
            op3(c, name, t, a, -1, -1);
            a = t, st = "f32";
        }
        snprintf(name, sizeof name, "cvt_%s_%s_%s", r, dt, st);
        const OpInfo *o = find_op(name);
        if (!o) return false;
        if (o->d == db) op3(c, name, d, a, -1, -1);
        else { /* the register is wider than the type */
            int t = new_reg(c, o->d);
            op3(c, name, t, a, -1, -1);
            snprintf(name, sizeof name, "icvt_%d_%s_%d", db, dt, o->d);
            op3(c, name, d, t, -1, -1);
        }
        return true;
    }
    const char *r = has(s, "rna") ? "rna_" : has(s, "rni") ? "rni_" : has(s, "rzi") ? "rzi_" : has(s, "rmi") ? "rmi_" : has(s, "rpi") ? "rpi_"
                  : has(s, "rz") ? "rz_" : has(s, "rm") ? "rm_" : has(s, "rp") ? "rp_" : "";
    if (!*r && !strcmp(dt, st)) { /* cvt.sat.f32.f32, cvt.f32.f32 */
        if (has(s, "sat") && !strcmp(dt, "f32")) op3(c, "sat_f32", d, a, -1, -1);
        else snprintf(name, sizeof name, "mov_b%d", db * 8), op3(c, name, d, a, -1, -1);
        return true;
    }
    snprintf(name, sizeof name, "cvt_%s%s_%s", r, dt, st);
    if (!find_op(name) || has(s, "sat") || has(s, "relu")) return false;
    op3(c, name, d, a, -1, -1);
    return true;
}

/* opcode and type give the operation's name; the operands' sizes come from its entry */
bool translate_plain(Compiler *c, Stmt *s) {
    const char *base = s->part[0], *type = type_of(s);
    char name[64], stem[48];
    bool real = strchr(type, 'f') != NULL && strcmp(base, "selp");
    snprintf(stem, sizeof stem, "%s", base);
    if (real && !strcmp(base, "mad")) snprintf(stem, sizeof stem, "fma");
    else if (has(s, "lo") && !real && strcmp(base, "setp")) snprintf(stem, sizeof stem, "%s_lo", base);
    else if (has(s, "hi") && !real && strcmp(base, "setp")) snprintf(stem, sizeof stem, "%s_hi", base);
    else if (has(s, "wide")) snprintf(stem, sizeof stem, "%s_wide", base);
    else if (has(s, "NaN")) snprintf(stem, sizeof stem, "%s_NaN", base);
    else if (has(s, "relu")) snprintf(stem, sizeof stem, "%s_relu", base);
    else if (!strcmp(base, "shf")) snprintf(stem, sizeof stem, "shf_%s_%s", s->part[1], s->part[2]);
    else if (!strcmp(base, "testp")) snprintf(stem, sizeof stem, "testp_%s", s->part[1]);
    else if (!strcmp(base, "dp4a")) snprintf(stem, sizeof stem, "dp4a_%s", s->part[1]);
    if (has(s, "rz") || has(s, "rm") || has(s, "rp") || has(s, "cc") || has(s, "xorsign")) return false;
    snprintf(name, sizeof name, "%s_%s", stem, type);
    const OpInfo *o = find_op(name);
    if (!o) {
        snprintf(name, sizeof name, "%s_b%d", stem, type_bytes(type) * 8);
        if (!real) o = find_op(name);
    }
    if (!o) return false;
    int need = 1 + (o->a != 0) + (o->b != 0) + (o->c != 0);
    if (!strcmp(base, "testp")) need = 2;
    s64 imm = 0;
    if (!strcmp(base, "bfi") || !strcmp(base, "lop3")) { /* d, a, b, c, constant; bfi's order is d, a, b, pos, len */
        if (s->n != 5 || s->opd[4].kind != O_IMM) return false;
        imm = (s64)s->opd[4].value;
        s->n = 4;
    }
    if (s->n != need || s->opd[0].kind != O_REG) return false;
    int r[3] = {-1, -1, -1}, want[3] = {o->a, o->b, o->c};
    bool ftz = has(s, "ftz") && !strcmp(type, "f32");
    for (int j = 0; j + 1 < need; j++) {
        if ((r[j] = source(c, &s->opd[j + 1], want[j] < 0 ? 0 : want[j])) < 0) return false;
        if (s->opd[j + 1].neg) {
            int t = new_reg(c, 0);
            op3(c, "not_pred", t, r[j], -1, -1);
            r[j] = t;
        }
        if (ftz && want[j] == 4) {
            int t = new_reg(c, 4);
            op3(c, "flush_f32", t, r[j], -1, -1);
            r[j] = t;
        }
    }
    int d = s->opd[0].reg;
    if (c->regs[d].bytes != (o->d < 0 ? 0 : o->d)) return false;
    int i = op3(c, name, d, r[0], r[1], r[2]);
    c->f->code[i].imm = imm;
    if (!strcmp(stem, "fma")) c->f->code[i].op = IS_FMA;
    if (ftz && o->d == 4) op3(c, "flush_f32", d, d, -1, -1);
    if (has(s, "sat")) {
        if (strcmp(type, "f32")) return false;
        op3(c, "sat_f32", d, d, -1, -1);
    }
    return true;
}

/* setp.cmp[.bool].type p[|q], a, b[, [!]c] */
bool translate_compare(Compiler *c, Stmt *s) {
    const char *type = type_of(s), *cmp = s->part[1], *combine = has(s, "and") ? "and" : has(s, "or") ? "or" : has(s, "xor") ? "xor" : NULL;
    char name[48];
    bool real = strchr(type, 'f') != NULL;
    snprintf(name, sizeof name, "setp_%s_%s", cmp, type);
    const OpInfo *o = find_op(name);
    if (!o && !real) {
        snprintf(name, sizeof name, "setp_%s_b%d", cmp, type_bytes(type) * 8);
        o = find_op(name);
    }
    if (!o || s->opd[0].kind != O_REG) return false;
    int a = source(c, &s->opd[1], o->a < 0 ? 0 : o->a), b = source(c, &s->opd[2], o->b < 0 ? 0 : o->b);
    if (a < 0 || b < 0) return false;
    if (has(s, "ftz")) {
        int x = new_reg(c, 4), y = new_reg(c, 4);
        op3(c, "flush_f32", x, a, -1, -1), op3(c, "flush_f32", y, b, -1, -1);
        a = x, b = y;
    }
    int p = s->opd[0].reg, q = s->opd[0].pair;
    if (!combine && q < 0) {
        op3(c, name, p, a, b, -1);
        return true;
    }
    int t = new_reg(c, 0), u = new_reg(c, 0);
    op3(c, name, t, a, b, -1);
    op3(c, "not_pred", u, t, -1, -1);
    if (!combine) {
        op3(c, "mov_pred", p, t, -1, -1), op3(c, "mov_pred", q, u, -1, -1);
        return true;
    }
    int third = source(c, &s->opd[3], 0);
    if (third < 0) return false;
    if (s->opd[3].neg) {
        int v = new_reg(c, 0);
        op3(c, "not_pred", v, third, -1, -1);
        third = v;
    }
    int keep = third;
    if (q >= 0) {
        keep = new_reg(c, 0);
        op3(c, "mov_pred", keep, third, -1, -1);
    }
    snprintf(name, sizeof name, "%s_pred", combine);
    op3(c, name, p, t, third, -1);
    if (q >= 0) op3(c, name, q, u, keep, -1);
    return true;
}
