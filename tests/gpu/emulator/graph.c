/* Graphs by stream capture: what is enqueued while a stream captures is kept and not run, and a launch enqueues all of it.
 * Kernels, copies and memsets of one stream. As in CUDA a call that would wait, allocate or load a module ends a capture
 * of its thread as failed.
 */
#include "stream.h"

typedef struct Graph {
    Op *first, *last;
    int count;
} Graph;

static _Thread_local Stream *capturing;
static _Thread_local bool failed;
static u64 ids;

static Op *copied(const Op *o) {
    Op *c = malloc(sizeof *c);
    *c = *o;
    c->next = NULL;
    if (o->launch.params) {
        c->launch.params = malloc((size_t)o->launch.f->param_bytes + 16);
        memcpy(c->launch.params, o->launch.params, (size_t)o->launch.f->param_bytes);
    }
    if (o->staged) {
        c->staged = malloc(o->n);
        memcpy(c->staged, o->staged, o->n);
    }
    return c;
}

bool graph_takes(Stream *s, Op *o) {
    Graph *g = s->capture;
    if (!g) return false;
    o->next = NULL;
    if (g->last) g->last->next = o;
    else g->first = o;
    g->last = o;
    g->count++;
    return true;
}
int graph_forbids(void) {
    if (!capturing) return CU_OK;
    failed = true;
    return CU_CAPTURE_UNSUPPORTED;
}

API int cuStreamBeginCapture_v2(void *h, int mode) {
    Stream *s = stream_of(h);
    (void)mode;
    if (!h || s->capture || capturing) return CU_CAPTURE_UNSUPPORTED; /* the default stream cannot */
    s->capture = calloc(1, sizeof(Graph));
    s->capture_id = ++ids;
    capturing = s, failed = false;
    return CU_OK;
}
API int cuStreamBeginCapture(void *h) { return cuStreamBeginCapture_v2(h, 0); }
API int cuStreamEndCapture(void *h, void **out) {
    Stream *s = stream_of(h);
    *out = NULL;
    if (!s->capture) return CU_INVALID_VALUE;
    Graph *g = s->capture;
    s->capture = NULL, capturing = NULL;
    if (failed) return CU_CAPTURE_INVALIDATED; /* the graph is lost, as there */
    *out = g;
    return CU_OK;
}
API int cuStreamIsCapturing(void *h, int *status) {
    Stream *s = stream_of(h);
    *status = s->capture ? failed ? 2 : 1 : 0;
    return CU_OK;
}
API int cuStreamGetCaptureInfo_v2(void *h, int *status, u64 *id, void **graph, const void ***deps, size_t *n) {
    Stream *s = stream_of(h);
    *status = s->capture ? 1 : 0;
    if (id) *id = s->capture ? s->capture_id : 0;
    if (graph) *graph = s->capture;
    if (deps) *deps = NULL;
    if (n) *n = 0;
    return CU_OK;
}
static int instantiate(void **exec, Graph *g) {
    Graph *e = calloc(1, sizeof *e);
    for (Op *o = g->first; o; o = o->next) {
        Op *c = copied(o);
        if (e->last) e->last->next = c;
        else e->first = c;
        e->last = c, e->count++;
    }
    *exec = e;
    return CU_OK;
}
API int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    (void)flags;
    return instantiate(exec, graph);
}
API int cuGraphInstantiate(void **exec, void *graph, unsigned long long flags) { return cuGraphInstantiateWithFlags(exec, graph, flags); }
API int cuGraphLaunch(void *exec, void *h) {
    Stream *s = stream_of(h);
    counts.graphs++;
    for (Op *o = ((Graph *)exec)->first; o; o = o->next) {
        int e = stream_add(s, copied(o));
        if (e) return e;
    }
    return CU_OK;
}
static int destroy(Graph *g) {
    for (Op *o = g->first, *next; o; o = next) {
        next = o->next;
        op_end(o);
    }
    free(g);
    return CU_OK;
}
API int cuGraphDestroy(void *g) { return destroy(g); }
API int cuGraphExecDestroy(void *g) {
    for (int d = 0; d < settings.devices; d++) stream_wait_all(d);
    return destroy(g);
}
API int cuGraphGetNodes(void *g, void **nodes, size_t *n) {
    if (nodes) return CU_NOT_SUPPORTED;
    *n = (size_t)((Graph *)g)->count;
    return CU_OK;
}
