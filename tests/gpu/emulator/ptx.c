/* Reads the text of a PTX module: declarations, registers, labels; statements go to translate.c.
 *
 * Written from the PTX ISA 8.x for what LLVM's back end emits. What is not known is kept as an instruction that is an
 * error when it is reached.
 */
#include <ctype.h>
#include <setjmp.h>

#include "ptx.h"

typedef struct Body { /* a device function, or a kernel, before it is read */
    char *name, *results, *params, *text;
    int line;
    bool entry;
} Body;

typedef struct Reader {
    char *p;
    Body *bodies;
    int nbodies, capbodies;
    int line;
    Module *m;
    Compiler *c;
    jmp_buf out;
} Reader;

static void fail(Reader *r, const char *what) {
    fprintf(stderr, "[emulated GPU] PTX line %d: %s\n", r->line, what);
    longjmp(r->out, 1);
}

static void space(Reader *r) {
    for (;; r->p++) {
        if (*r->p == '\n') r->line++;
        else if (!isspace((u8)*r->p)) return;
    }
}
static bool ident_char(char c) { return isalnum((u8)c) || c == '_' || c == '$' || c == '%' || c == '.'; }

static char *token(Reader *r) { /* an identifier, number, or one character; "" at the end */
    space(r);
    char *s = r->p;
    if (!*s) return strdup("");
    if (*s == '"') {
        for (r->p++; *r->p && *r->p != '"';) r->p++;
        if (*r->p) r->p++;
        return strndup(s, (size_t)(r->p - s));
    }
    if (!ident_char(*s)) return strndup(r->p++, 1);
    for (;;) {
        while (ident_char(*r->p)) r->p++;
        if (r->p[0] == ':' && r->p[1] == ':') r->p += 2;
        else break;
    }
    return strndup(s, (size_t)(r->p - s));
}
static char peek(Reader *r) {
    space(r);
    return *r->p;
}
static bool accept(Reader *r, char c) {
    if (peek(r) != c) return false;
    r->p++;
    return true;
}
static void expect(Reader *r, char c) {
    if (!accept(r, c)) {
        char text[64];
        snprintf(text, sizeof text, "'%c' expected before '%.20s'", c, r->p);
        fail(r, text);
    }
}
static void skip_to(Reader *r, char c) {
    while (*r->p && *r->p != c) {
        if (*r->p == '\n') r->line++;
        r->p++;
    }
    if (*r->p) r->p++;
}

int type_bytes(const char *t) {
    if (!strcmp(t, "pred")) return 0;
    const char *d = t;
    while (*d && !isdigit((u8)*d)) d++;
    int n = atoi(d);
    const char *x = strchr(d, 'x');
    return x ? n * atoi(x + 1) / 8 : n / 8;
}

static void define(Compiler *c, char *prefix, int count, int bytes) {
    int base = c->nregs;
    for (int i = 0; i < (count < 0 ? 1 : count); i++) new_reg(c, bytes);
    GROW(c->names, c->nnames, c->capnames);
    c->names[c->nnames++] = (RegName){prefix, count, base};
}
static int find_reg(Compiler *c, const char *name) {
    size_t len = strlen(name), d = len;
    while (d > 0 && isdigit((u8)name[d - 1])) d--;
    for (int i = c->nnames - 1; i >= 0; i--) {
        RegName *n = &c->names[i];
        if (n->count < 0) {
            if (!strcmp(n->prefix, name)) return n->base;
        } else if (strlen(n->prefix) == d && !strncmp(n->prefix, name, d) && d < len) {
            int k = atoi(name + d);
            if (k < n->count) return n->base + k;
        }
    }
    return -1;
}
static Symbol *find_symbol(Compiler *c, const char *name) {
    for (Symbol *s = c->locals; s; s = s->next)
        if (!strcmp(s->name, name)) return s;
    for (Symbol *s = c->module->globals; s; s = s->next)
        if (!strcmp(s->name, name)) return s;
    return NULL;
}

static u64 number(const char *t, int *real) {
    *real = 0;
    if (t[0] == '0' && (t[1] == 'f' || t[1] == 'F')) return *real = 32, strtoull(t + 2, NULL, 16);
    if (t[0] == '0' && (t[1] == 'd' || t[1] == 'D')) return *real = 64, strtoull(t + 2, NULL, 16);
    if (strchr(t, '.') && t[1] != 'x') {
        double x = strtod(t, NULL);
        u64 b;
        memcpy(&b, &x, 8);
        *real = 64;
        return b;
    }
    return t[0] == '0' && t[1] == 'b' ? strtoull(t + 2, NULL, 2) : strtoull(t, NULL, 0);
}

static Opd operand(Reader *r) {
    Compiler *c = r->c;
    Opd o = {.kind = O_NONE, .pair = -1, .reg = -1};
    if (accept(r, '!')) {
        o = operand(r);
        o.neg = true;
        return o;
    }
    if (accept(r, '{') || accept(r, '(')) {
        char end = r->p[-1] == '{' ? '}' : ')';
        o.kind = O_VEC;
        int cap = 0;
        while (!accept(r, end)) {
            if (o.n == cap) o.sub = realloc(o.sub, sizeof *o.sub * (size_t)(cap = cap ? 2 * cap : 4));
            o.sub[o.n++] = operand(r);
            accept(r, ',');
        }
        return o;
    }
    if (accept(r, '[')) {
        o.kind = O_ADDR;
        o.sub = calloc(2, sizeof *o.sub); /* the base, and the coordinates of a box of a tensor */
        o.sub[0] = operand(r);
        while (!accept(r, ']')) {
            if (accept(r, ',')) {
                o.sub[1] = operand(r);
                continue;
            }
            if (accept(r, '+')) continue;
            bool minus = accept(r, '-');
            char *t = token(r);
            int real;
            if (!*t) fail(r, "an address without end");
            s64 v = (s64)number(t, &real);
            o.offset += minus ? -v : v;
            free(t);
        }
        if (o.sub[0].kind == O_IMM) o.offset += (s64)o.sub[0].value;
        return o;
    }
    bool minus = accept(r, '-');
    char *t = token(r);
    if (isdigit((u8)*t)) {
        o.kind = O_IMM;
        o.value = number(t, &o.real);
        if (minus) o.value = (u64)0 - o.value;
        free(t);
        return o;
    }
    o.name = t;
    bool sink = !strcmp(t, "_");
    if (!sink) o.reg = find_reg(c, t);
    if (sink || o.reg >= 0) {
        o.kind = sink ? O_SINK : O_REG;
        if (accept(r, '|')) {
            char *u = token(r);
            o.pair = find_reg(c, u);
            free(u);
        }
        return o;
    }
    if (*t == '%' && (o.n = special_index(t)) >= 0) o.kind = O_SPECIAL;
    else if ((o.sym = find_symbol(c, t))) {
        o.kind = O_SYM;
        if (accept(r, '+')) {
            char *u = token(r);
            int real;
            o.offset = (s64)number(u, &real);
            free(u);
        }
    } else o.kind = O_NAME;
    return o;
}

/* .align 4 .b8 name[16] = {..}; in the space of the directive. The address is given by the caller. */
static void variable(Reader *r, int where, Symbol **list, int *bytes_used, bool external) {
    int align = 1, elem = 1;
    for (;;) {
        char *t = token(r);
        if (!strcmp(t, ".align")) {
            free(t);
            t = token(r);
            align = atoi(t);
        } else if (t[0] == '.') {
            if (isalpha((u8)t[1]) && isdigit((u8)t[strlen(t) - 1]) && type_bytes(t + 1)) elem = type_bytes(t + 1);
        } else {
            Symbol *s = calloc(1, sizeof *s);
            s->name = t, s->space = where, s->align = align > elem ? align : elem;
            s->size = elem;
            while (accept(r, '[')) {
                if (accept(r, ']')) s->dynamic = true;
                else {
                    char *n = token(r);
                    s->size *= atoll(n);
                    free(n);
                    expect(r, ']');
                }
            }
            if (s->dynamic) s->size = 0;
            if (where == GLOBAL && !external) {
                memory_allocate(r->m->device, (size_t)(s->size ? s->size : 1), false, &s->address);
                memset((void *)s->address, 0, (size_t)s->size);
                if (accept(r, '=')) {
                    u8 *p = (u8 *)s->address, *end = p + s->size;
                    int depth = 0;
                    do {
                        if (accept(r, '{')) depth++;
                        else if (accept(r, '}')) depth--;
                        else if (!accept(r, ',')) {
                            bool minus = accept(r, '-');
                            char *n = token(r);
                            int real;
                            u64 v = number(n, &real);
                            if (!isdigit((u8)*n)) fail(r, "an initial value that is no number");
                            if (minus) v = (u64)0 - v;
                            if (p + elem <= end) memcpy(p, &v, (size_t)elem);
                            p += elem;
                            free(n);
                        }
                    } while (depth);
                }
            } else if (bytes_used) {
                *bytes_used = (*bytes_used + s->align - 1) / s->align * s->align;
                s->address = (u64)*bytes_used;
                *bytes_used += (int)s->size;
            }
            s->next = *list, *list = s;
            if (accept(r, ',')) continue;
            expect(r, ';');
            return;
        }
    }
}

static void params(Reader *r, Func *f, Symbol **list) {
    int offset = 0;
    while (!accept(r, ')')) {
        int align = 1, elem = 1, n = f->nparams;
        s64 size = 0;
        for (;;) {
            char *t = token(r);
            if (!strcmp(t, ".align")) {
                char *u = token(r);
                if (!elem || elem == 1) align = atoi(u);
                free(u);
            } else if (!strcmp(t, ".ptr")) {
                free(t);
                for (;;) { /* .ptr .global .align 4: about the pointer, not the parameter */
                    t = token(r);
                    if (!strcmp(t, ".align")) free(token(r));
                    else if (*t != '.') break;
                    free(t);
                }
                goto name;
            } else if (*t == '.') {
                if (isdigit((u8)t[strlen(t) - 1])) elem = type_bytes(t + 1);
            } else {
            name:
                size = elem;
                if (accept(r, '[')) {
                    char *u = token(r);
                    size = elem * atoll(u);
                    free(u);
                    expect(r, ']');
                }
                if (align < elem) align = elem;
                offset = (offset + align - 1) / align * align;
                f->param_offset = realloc(f->param_offset, sizeof(int) * (size_t)(n + 1));
                f->param_size = realloc(f->param_size, sizeof(int) * (size_t)(n + 1));
                f->param_offset[n] = offset, f->param_size[n] = (int)size;
                f->nparams++;
                Symbol *s = calloc(1, sizeof *s);
                s->name = t, s->space = PARAM, s->address = (u64)offset, s->size = size;
                s->next = *list, *list = s;
                offset += (int)size;
                break;
            }
            free(t);
        }
        accept(r, ',');
    }
    f->param_bytes = offset;
}

static void body(Reader *r);

/* the names of a list of parameters, (.param .b32 a, .param .align 8 .b8 b[16]) */
static int formal_names(Reader *r, char *at, char **names) {
    char *p = r->p;
    int n = 0, line = r->line;
    r->p = at;
    char *last = NULL;
    for (;;) {
        char *t = token(r);
        if (isalpha((u8)*t) || *t == '_' || *t == '$' || *t == '%') last = t;
        if (*t == ',' || *t == ')') {
            if (last && n < 64) names[n++] = last;
            last = NULL;
        }
        if (*t == ')' || !*t) break;
    }
    r->p = p, r->line = line;
    return n;
}

/* A call is the function's statements in the place of the call. Its parameters are the thread's local memory, where the
 * caller has put them. false: no such function, as printf. */
static bool call(Reader *r, Stmt *s) {
    Compiler *c = r->c;
    Opd none = {.kind = O_NONE}, *results = &none, *name = NULL, *actual = &none;
    for (int i = 0; i < s->n; i++) {
        if (s->opd[i].kind == O_NAME) name = &s->opd[i];
        else if (s->opd[i].kind == O_VEC && !name) results = &s->opd[i];
        else if (s->opd[i].kind == O_VEC) actual = &s->opd[i];
    }
    Body *b = NULL;
    for (int i = 0; name && i < r->nbodies; i++)
        if (!r->bodies[i].entry && !strcmp(r->bodies[i].name, name->name)) b = &r->bodies[i];
    if (!b || s->guard >= 0) return false;
    if (c->depth > 30) fail(r, "calls nested too deeply: recursion is not emulated");
    for (int k = 0; k < 2; k++) {
        char *names[64];
        Opd *list = k ? actual : results;
        char *text = k ? b->params : b->results;
        int n = text ? formal_names(r, text, names) : 0;
        if (n != list->n) return false;
        for (int i = 0; i < n; i++) {
            if (list->sub[i].kind != O_SYM) return false;
            Symbol *f = calloc(1, sizeof *f);
            *f = *list->sub[i].sym;
            f->name = names[i], f->next = c->locals, c->locals = f;
        }
    }
    char *p = r->p;
    int line = r->line, outer = c->call, nnames = c->nnames;
    r->p = b->text, r->line = b->line, c->call = ++c->ncalls, c->depth++;
    body(r);
    emit_label(c, "return");
    r->p = p, r->line = line, c->call = outer, c->nnames = nnames, c->depth--;
    return true;
}

static void statement(Reader *r, char *first) {
    Stmt s = {.line = r->line, .guard = -1};
    char *t = first;
    if (*t == '@') {
        s.guard_not = accept(r, '!');
        char *g = token(r);
        s.guard = find_reg(r->c, g);
        if (s.guard < 0) fail(r, "an unknown predicate");
        t = token(r);
    }
    s.op = t;
    char *copy = strdup(t);
    for (char *p = copy, *dot; p; p = dot) {
        dot = strchr(p, '.');
        if (dot) *dot++ = 0;
        if (s.nparts < MAX_PARTS) s.part[s.nparts++] = p;
    }
    while (!accept(r, ';')) {
        if (s.n == MAX_OPDS) fail(r, "too many operands");
        if (!peek(r)) fail(r, "a statement without end");
        s.opd[s.n++] = operand(r);
        accept(r, ',');
    }
    r->c->line = s.line;
    if (strcmp(s.part[0], "call")) translate(r->c, &s);
    else if (!call(r, &s)) emit_unknown(r->c, &s);
}

/* A block {..}, such as inline assembly. Its labels are its own, so they are read before the statements that jump to them. */
static Scope *new_scope(Reader *r, Scope *outer) {
    Scope *s = calloc(1, sizeof *s);
    s->outer = outer, s->number = ++r->c->nscopes;
    int depth = 1;
    for (char *p = r->p; depth && *p; p++) {
        if (*p == '{') depth++;
        else if (*p == '}') depth--;
        else if (*p == ':' && p[1] != ':' && p[-1] != ':' && depth == 1) { /* no "::" of a name such as shared::cta */
            char *end = p, *at;
            while (end > r->p && isspace((u8)end[-1])) end--;
            for (at = end; at > r->p && ident_char(at[-1]); at--) {}
            if (end == at) continue;
            GROW(s->labels, s->n, s->cap);
            s->labels[s->n++] = strndup(at, (size_t)(end - at));
        }
    }
    return s;
}

static void body(Reader *r) {
    Compiler *c = r->c;
    int depth = 1, scope[64];
    Scope *outer[64];
    while (depth) {
        char *t = token(r);
        if (!*t) fail(r, "a function without end");
        if (*t == '{') {
            if (depth == 63) fail(r, "scopes nested too deeply");
            outer[depth] = c->scope;
            c->scope = new_scope(r, c->scope);
            scope[depth++] = c->nnames;
        } else if (*t == '}') {
            if (--depth) c->nnames = scope[depth], c->scope = outer[depth];
        } else if (!strcmp(t, ".reg")) {
            char *type = token(r);
            int bytes = type_bytes(type + 1);
            do {
                char *name = token(r);
                int n = -1;
                if (accept(r, '<')) {
                    char *u = token(r);
                    n = atoi(u);
                    free(u);
                    expect(r, '>');
                }
                define(c, name, n, bytes);
            } while (accept(r, ','));
            expect(r, ';');
        } else if (!strcmp(t, ".shared")) variable(r, SHARED, &c->locals, &c->f->shared_bytes, false);
        else if (!strcmp(t, ".local")) variable(r, LOCAL, &c->locals, &c->f->local_bytes, false);
        else if (!strcmp(t, ".param")) variable(r, LOCAL, &c->locals, &c->f->local_bytes, false); /* of a call */
        else if (!strcmp(t, ".loc") || !strcmp(t, ".file")) skip_to(r, '\n'), r->line++;
        else if (!strcmp(t, ".pragma")) skip_to(r, ';');
        else if (!strcmp(t, ".branchtargets")) {
            c->ntargets = 0;
            while (!accept(r, ';')) {
                c->targets = realloc(c->targets, sizeof(char *) * (size_t)(c->ntargets + 1));
                c->targets[c->ntargets++] = token(r);
                accept(r, ',');
            }
        } else if (*t == '.') {
            skip_to(r, ';');
        } else if (*t == ';') continue;
        else if (peek(r) == ':') {
            r->p++;
            c->targets_name = t;
            emit_label(c, t);
        } else statement(r, t);
    }
}

static void skip_body(Reader *r) {
    for (int depth = 1; depth && *r->p; r->p++) {
        if (*r->p == '{') depth++;
        if (*r->p == '}') depth--;
        if (*r->p == '\n') r->line++;
    }
}

/* notes where a function is, behind .func or .entry */
static void header(Reader *r, bool entry) {
    Body b = {.entry = entry};
    if (peek(r) == '(') {
        b.results = r->p;
        skip_to(r, ')');
    }
    b.name = token(r);
    if (peek(r) == '(') {
        b.params = r->p + 1;
        b.line = r->line;
        skip_to(r, ')');
    }
    if (!entry) {
        while (peek(r) != '{') {
            if (accept(r, ';')) return; /* a declaration */
            free(token(r));
        }
        expect(r, '{');
        b.text = r->p, b.line = r->line;
    } else {
        while (peek(r) != '{') {
            if (accept(r, ';')) return;
            free(token(r));
        }
        expect(r, '{');
    }
    GROW(r->bodies, r->nbodies, r->capbodies);
    r->bodies[r->nbodies++] = b;
    skip_body(r);
}

static void kernel(Reader *r, const Body *b) {
    Compiler c = {.module = r->m};
    Func *f = calloc(1, sizeof *f);
    c.f = f, f->module = r->m, r->c = &c;
    pthread_mutex_init(&f->lock, NULL);
    f->name = b->name;
    r->p = b->params, r->line = b->line;
    if (b->params) params(r, f, &c.locals);
    while (peek(r) != '{') { /* .maxntid 256, 1, 1 and the like */
        char *t = token(r);
        bool max = !strcmp(t, ".maxntid"), exact = !strcmp(t, ".reqntid");
        free(t);
        if (!max && !exact) continue;
        int n = 1;
        do {
            t = token(r);
            n *= atoi(t);
            free(t);
        } while (accept(r, ','));
        f->max_threads = n;
    }
    expect(r, '{');
    for (Symbol *s = r->m->globals; s; s = s->next)
        if (s->space == SHARED && (int)(s->address + (u64)s->size) > f->shared_bytes) f->shared_bytes = (int)(s->address + (u64)s->size);
    emit_control(&c, C_LABEL, 0);
    body(r);
    f->local_bytes = (f->local_bytes + 15) / 16 * 16;
    finish(&c);
    r->c = NULL;
    f->next = r->m->funcs, r->m->funcs = f;
}

static void blank_comments(char *s) {
    for (; *s; s++) {
        if (s[0] == '"') {
            for (s++; *s && *s != '"'; s++) {}
            if (!*s) return;
        } else if (s[0] == '/' && s[1] == '/') {
            while (*s && *s != '\n') *s++ = ' ';
            if (!*s) return;
        } else if (s[0] == '/' && s[1] == '*') {
            while (*s && !(s[0] == '*' && s[1] == '/')) {
                if (*s != '\n') *s = ' ';
                s++;
            }
            if (!*s) return;
            s[0] = s[1] = ' ';
        }
    }
}

Module *ptx_load(const char *text, int device) {
    Module *m = calloc(1, sizeof *m);
    m->device = device;
    m->text = strdup(text);
    int cap = 0;
    for (char *p = m->text; p;) {
        GROW(m->lines, m->nlines, cap);
        m->lines[m->nlines++] = p;
        p = strchr(p, '\n');
        if (p) *p++ = 0;
    }
    char *copy = strdup(text);
    blank_comments(copy);
    Reader r = {.p = copy, .line = 1, .m = m};
    if (setjmp(r.out)) {
        free(copy);
        return NULL;
    }
    bool external = false;
    for (;;) {
        char *t = token(&r);
        if (!*t) break;
        if (!strcmp(t, ".extern")) external = true;
        if (!strcmp(t, ".version") || !strcmp(t, ".target") || !strcmp(t, ".address_size") || !strcmp(t, ".file")) {
            skip_to(&r, '\n');
            r.line++;
        } else if (!strcmp(t, ".entry")) header(&r, true), external = false;
        else if (!strcmp(t, ".func")) {
            if (external) skip_to(&r, ';');
            else header(&r, false);
            external = false;
        } else if (!strcmp(t, ".global") || !strcmp(t, ".const")) variable(&r, GLOBAL, &m->globals, NULL, external), external = false;
        else if (!strcmp(t, ".shared")) { /* of the module: in front of each function's own */
            int used = 0;
            for (Symbol *s = m->globals; s; s = s->next)
                if (s->space == SHARED && !s->dynamic && (int)(s->address + (u64)s->size) > used) used = (int)(s->address + (u64)s->size);
            variable(&r, SHARED, &m->globals, &used, external);
            external = false;
        } else if (!strcmp(t, ".section")) {
            skip_to(&r, '{');
            skip_to(&r, '}');
        } else if (*t == '.' || *t == ';') { /* .visible, .weak, .extern, ... */
        }
        free(t);
    }
    for (int i = 0; i < r.nbodies; i++)
        if (r.bodies[i].entry && r.bodies[i].params) kernel(&r, &r.bodies[i]);
    free(r.bodies);
    free(copy);
    return m;
}

void ptx_unload(Module *m) {
    for (Symbol *s = m->globals; s; s = s->next)
        if (s->space == GLOBAL && s->address) memory_free(s->address);
    /* functions stay: their counters are written at the end */
}
