/* What the parts of the emulated GPU share: compiled PTX, warps, memory, findings.
 *
 * A CUDA driver for tests on machines without a GPU. Not a simulator of a GPU's timing: it executes PTX as the ISA
 * defines it, a warp of 32 lanes at a time, and reports what a real GPU would silently get wrong.
 */
#ifndef EMULATOR_H
#define EMULATOR_H
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

enum { WARP = 32, MAX_WARPS = 32, MAX_DEVICES = 16 };
enum { /* CUresult */
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_INVALID_DEVICE = 101,
    CU_NO_BINARY = 209,
    CU_INVALID_PTX = 218,
    CU_INVALID_HANDLE = 400,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_ILLEGAL_ADDRESS = 700,
    CU_OUT_OF_RESOURCES = 701,
    CU_PEER_ALREADY = 704,
    CU_NOT_SUPPORTED = 801,
    CU_CAPTURE_UNSUPPORTED = 900,
    CU_CAPTURE_INVALIDATED = 901,
};
#define API __attribute__((visibility("default")))

typedef struct Warp Warp;
typedef struct Inst Inst;
typedef void (*Fn)(Warp *, char *, const Inst *, u32);

/* One instruction. d, a, b, c are byte offsets into the warp's registers; an operation with a list of registers (vector
 * loads, mma) has an index into Func.vec in d. An operation without `fn` is control flow (enum Control). */
struct Inst {
    Fn fn;
    s32 d, a, b, c;
    s64 imm;
    u16 op, k;
    s32 line;
};

enum Control { C_LABEL = 1, C_GUARD, C_UNGUARD, C_BRA, C_JMP, C_EXIT, C_BAR, C_CONVERGE, C_UNKNOWN, C_TRAP, C_BRX, IS_FMA };
enum Space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

typedef struct { s32 offset, bytes; u64 value; } Const;   /* a register that holds a constant */
typedef struct { s32 offset, which; } Special;           /* a register that holds %tid.x and the like */
enum { S_TIDX, S_TIDY, S_TIDZ, S_NTIDX, S_NTIDY, S_NTIDZ, S_CTAIDX, S_CTAIDY, S_CTAIDZ, S_NCTAIDX, S_NCTAIDY, S_NCTAIDZ,
       S_LANEID, S_WARPID, S_NWARPID, S_SMID, S_NSMID, S_GRIDID, S_LANEMASK_EQ, S_LANEMASK_LT, S_LANEMASK_LE,
       S_LANEMASK_GT, S_LANEMASK_GE, S_CLOCK, S_CLOCK64, S_GLOBALTIMER, S_DYNSMEM, S_TOTSMEM, S_COUNT };

typedef struct Stats {
    u64 launches, warp_inst, fma, mma, load_bytes, load_sectors, store_bytes, store_sectors, shared_access, shared_extra;
    u32 grid[3], block[3];
} Stats;

typedef struct Func {
    char *name;
    Inst *code;
    int n, cap;
    s32 *vec;
    int nvec;
    Const *consts;
    int nconsts;
    Special *specials;
    int nspecials;
    int reg_bytes;
    int *param_offset, *param_size;
    int nparams, param_bytes;
    int shared_bytes, local_bytes, registers, max_threads; /* max_threads: of .maxntid, or 0 */
    int dynamic_shared_max;
    struct Module *module;
    struct Func *next;
    Stats stats;
    pthread_mutex_t lock;
} Func;

typedef struct Module {
    char *text;
    char **lines; /* the source, for messages */
    int nlines;
    Func *funcs;
    struct Symbol *globals;
    int device;
} Module;

typedef struct Symbol {
    char *name;
    int space, align;
    u64 address; /* global: where it is; shared and local: offset */
    s64 size;
    bool dynamic;
    struct Symbol *next;
} Symbol;

typedef struct { int pc; u32 mask; bool waits; } Group;

typedef struct CopyItem { /* a cp.async that has been issued and not waited for */
    u32 mask;
    u8 bytes, from[WARP];
    const Inst *inst;
    u32 dst[WARP];
    u64 src[WARP];
    int group;
} CopyItem;

struct Warp {
    char *regs;
    struct Block *block;
    int id, lanes; /* lanes: threads of this warp that exist */
    u32 live, exited, active;
    Group g[WARP + 1];
    int ng, pc, minpc;
    int bar_id, bar_count;
    const Inst *bar; /* where it waits */
    enum { READY, AT_BARRIER, DONE } state;
    char *local;
    CopyItem *copies;
    int ncopies, capcopies, group;
    s64 budget;
    bool waits;   /* a barrier in shared memory was not complete, so it is another warp's turn */
    u32 waits_at; /* where that barrier is in shared memory */
};

typedef struct Launch {
    Func *f;
    u32 grid[3], block[3], shared;
    char *params;
    int device;
    u64 nblocks;
    _Atomic u64 next;
    _Atomic int error;
    u32 *order;
    u64 seed;
} Launch;

typedef struct Block { /* what one worker thread needs to run a block */
    Launch *launch;
    u32 id[3];
    Warp warps[MAX_WARPS];
    int nwarps, nthreads;
    char *regs, *local;
    size_t regs_bytes, local_bytes;
    u8 *shared, *writer, *reader, *init; /* bytes of shared memory and, for each, who wrote and read it since the barrier */
    u32 shared_bytes, shared_cap, dirty_lo, dirty_hi;
    bool no_races;
    s64 yields;
    int idle;   /* rounds in which all warps have only waited for barriers in shared memory */
    u64 events; /* changes of barriers in shared memory */
    int arrived[16], expected[16];
    int red_count[16], red_true[16];
    Func *prepared;
    u64 cached[4][2]; /* allocations of the last accesses */
    unsigned next_cached;
    u64 rng;
    Stats stats;
    jmp_buf out;
} Block;

/* memory.c */
typedef struct Allocation {
    u64 address, size;
    int device;
    bool pinned, managed; /* managed: the bytes do not count as used memory of the device */
    bool opened;          /* memory of another process (ipc.c) */
    void *base;           /* what to unmap, or NULL */
    size_t base_size;
    int fd;               /* the file that other processes can map, or -1 */
    u64 offset;           /* where the allocation is in the file */
} Allocation;
int memory_find(u64 address, Allocation *found);
int memory_allocate(int device, size_t bytes, bool pinned, u64 *address);
int memory_add(u64 address, size_t bytes, int device, bool pinned);
int memory_open(int fd, u64 offset, size_t bytes, size_t whole, int device, u64 *address);
int memory_free(u64 address);
size_t memory_used(int device);
bool memory_was_freed(u64 address);
bool memory_is_pinned(const void *p);
bool memory_peer(int from, int to);
void memory_set_peer(int from, int to);
int memory_check_copy(u64 address, size_t bytes, const char *what);
extern u64 shared_window, local_window;
#define WINDOW (1ull << 24)

/* ptx.c */
Module *ptx_load(const char *text, int device);
void ptx_unload(Module *m);

/* ops.c, float.c, access.c, mma.c: tables of operations */
typedef struct { const char *name; Fn fn; s8 d, a, b, c; } OpInfo; /* bytes per lane; 0 none, -1 predicate */
extern const OpInfo ops_int[], ops_float[], ops_convert[];
float half_to_float(u16 h);
u16 float_to_half(float x);
u16 double_to_half(double x);
u16 double_to_bf16(double x);

void op_ld(Warp *, char *, const Inst *, u32);
void op_st(Warp *, char *, const Inst *, u32);
void op_ld_param(Warp *, char *, const Inst *, u32);
void op_atom(Warp *, char *, const Inst *, u32);
void op_cp_async(Warp *, char *, const Inst *, u32);
void op_cp_commit(Warp *, char *, const Inst *, u32);
void op_cp_wait(Warp *, char *, const Inst *, u32);
void op_ldmatrix(Warp *, char *, const Inst *, u32);
void op_stmatrix(Warp *, char *, const Inst *, u32);
void op_shfl(Warp *, char *, const Inst *, u32);
void op_vote(Warp *, char *, const Inst *, u32);
void op_match(Warp *, char *, const Inst *, u32);
void op_redux(Warp *, char *, const Inst *, u32);
void op_activemask(Warp *, char *, const Inst *, u32);
void op_nop(Warp *, char *, const Inst *, u32);
void op_clock(Warp *, char *, const Inst *, u32);
void op_mma_half(Warp *, char *, const Inst *, u32);
void op_mma_tf32(Warp *, char *, const Inst *, u32);
void op_elect(Warp *, char *, const Inst *, u32);

/* hopper.c: barriers in shared memory, TMA, wgmma */
void op_mbar_init(Warp *, char *, const Inst *, u32);
void op_mbar_inval(Warp *, char *, const Inst *, u32);
void op_mbar_arrive(Warp *, char *, const Inst *, u32);
void op_mbar_test(Warp *, char *, const Inst *, u32);
void op_tma(Warp *, char *, const Inst *, u32);
void op_bulk(Warp *, char *, const Inst *, u32);
void op_wgmma(Warp *, char *, const Inst *, u32);
void mbar_never(Warp *, const Inst *, u32) __attribute__((noreturn));

enum Atomics { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
enum ElemType { E_U, E_S, E_F, E_H, E_BF };

/* exec.c */
int exec_launch(Launch *);
void finding(Warp *w, const Inst *i, u32 lanes, const char *fmt, ...) __attribute__((noreturn, format(printf, 4, 5)));

/* settings, from the environment */
typedef struct { int devices, cc, late, threads; bool verbose, shuffle, stats; u64 memory, seed; const char *stats_file; } Settings;
extern Settings settings;
void settings_read(void);

/* calls of the host so far: read by emulator_counts (driver.c) */
typedef struct { _Atomic u64 launches, graphs, up, down, within, sets, waits, allocations, frees; } Counts;
extern Counts counts;

#define REG(T, off) ((T *)(R + (off)))
#endif
