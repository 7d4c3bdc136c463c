/* The two halves of the PTX compiler: ptx.c reads text, translate.c turns statements into instructions. */
#ifndef PTX_H
#define PTX_H
#include "emulator.h"

enum { O_NONE, O_REG, O_IMM, O_SYM, O_VEC, O_ADDR, O_SPECIAL, O_SINK, O_NAME };
typedef struct Opd {
    int kind, reg, n;
    bool neg;
    int real; /* 32 or 64: written as 0f.. or 0d.. */
    u64 value;
    s64 offset;
    char *name;
    Symbol *sym;
    struct Opd *sub; /* of a vector; of an address: its base, and the coordinates of a box */
    int pair;        /* d|p: the second register, or -1 */
} Opd;

typedef struct { int bytes; /* 0: predicate */ bool constant, special; u64 value; s32 offset; } VReg;
typedef struct { char *prefix; int count, base; /* count < 0: one register of that name */ } RegName;
typedef struct { int inst, field, vec, reg; bool def; } Ref;
typedef struct { char *name; int at; } Label;
typedef struct { int inst; char *name; } Fixup;
enum { MAX_PARTS = 20, MAX_OPDS = 24 };
typedef struct Scope { struct Scope *outer; int number, n, cap; char **labels; } Scope;

typedef struct Stmt {
    int line, guard;
    bool guard_not;
    char *op, *part[MAX_PARTS];
    int nparts, n;
    Opd opd[MAX_OPDS];
} Stmt;

typedef struct Compiler {
    Module *module;
    Func *f;
    VReg *regs;
    int nregs, capregs;
    RegName *names;
    int nnames, capnames;
    Ref *refs;
    int nrefs, caprefs;
    Label *labels;
    int nlabels, caplabels;
    Fixup *fixups;
    int nfixups, capfixups;
    int capvec;
    Symbol *locals; /* symbols of the function: shared, local, param */
    int line, call, depth; /* call: number of the inlined call whose body this is, 0 in the kernel itself */
    int ncalls, nscopes;
    Scope *scope; /* the innermost block */
    char **targets, *targets_name; /* of .branchtargets */
    int ntargets;
} Compiler;

void translate(Compiler *c, Stmt *s);
void finish(Compiler *c);
void place_registers(Compiler *c);
int new_reg(Compiler *c, int bytes);
int emit_control(Compiler *c, int op, s64 imm);
void emit_label(Compiler *c, const char *name);
char *label_name(Compiler *c, const char *name);
void emit_jump(Compiler *c, const char *label);
void emit_unknown(Compiler *c, const Stmt *s);
int special_index(const char *name);

/* translate.c for translate_alu.c, and back: false where the statement is not known */
int op3(Compiler *c, const char *name, int d, int a, int b, int cc);
const OpInfo *find_op(const char *name);
int source(Compiler *c, const Opd *o, int bytes);
int constant(Compiler *c, int bytes, u64 value);
int convert_int(Compiler *c, int reg, const char *type, int to);
bool has(const Stmt *s, const char *part);
bool is(const Stmt *s, const char *base);
bool is_type(const char *t);
const char *type_of(const Stmt *s);
int space_of(const Stmt *s);
bool translate_move(Compiler *c, Stmt *s);
bool translate_cvta(Compiler *c, Stmt *s);
bool translate_convert(Compiler *c, Stmt *s);
bool translate_plain(Compiler *c, Stmt *s);
bool translate_compare(Compiler *c, Stmt *s);
int type_bytes(const char *type);
#define GROW(p, n, cap) ((n) == (cap) ? (p) = realloc((p), sizeof *(p) * (size_t)((cap) = (cap) ? 2 * (cap) : 64)) : (p))
#endif
