/* Streams and events. By default an operation runs inside the call that enqueues it. With ODYSSEY_EMULATOR_LATE each
 * stream has a thread, and an operation runs only when somebody waits for it or when it has been in the queue for that
 * long: what relies on an event or a wait that is not there sees old data, every time and not once in a thousand runs.
 */
#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "stream.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams;
static Stream *defaults[MAX_DEVICES];
static _Atomic int errors[MAX_DEVICES];

u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}
int device_error(int device) { return atomic_load(&errors[device]); }
void device_fail(int device, int error) {
    int none = 0;
    if (!error) atomic_store(&errors[device], 0);
    else atomic_compare_exchange_strong(&errors[device], &none, error);
}

Op *op_new(int (*run)(Op *)) {
    Op *o = calloc(1, sizeof *o);
    o->run = run;
    return o;
}
void op_end(Op *o) {
    free(o->staged);
    free(o->launch.params);
    free(o);
}

static void *serve(void *arg) {
    Stream *s = arg;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->head) {
            if (s->gone) {
                s->threaded = false;
                pthread_mutex_unlock(&lock);
                return NULL;
            }
            pthread_cond_wait(&changed, &lock);
        }
        Op *o = s->head;
        while (o->seq > s->forced && now_ns() < o->due) {
            struct timespec t = {(time_t)(o->due / 1000000000ull), (long)(o->due % 1000000000ull)};
            pthread_cond_timedwait(&changed, &lock, &t);
        }
        pthread_mutex_unlock(&lock);
        int e = device_error(s->device);
        if (!e && (e = o->run(o))) device_fail(s->device, e);
        pthread_mutex_lock(&lock);
        s->head = o->next;
        if (!s->head) s->tail = NULL;
        s->completed = o->seq;
        op_end(o);
        pthread_cond_broadcast(&changed);
    }
}

Stream *stream_new(int device, u32 flags, int priority) {
    Stream *s = calloc(1, sizeof *s);
    s->device = device, s->flags = flags, s->priority = priority;
    pthread_mutexattr_t again; /* a host function may come back */
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&s->running, &again);
    pthread_mutex_lock(&lock);
    s->next = streams, streams = s;
    pthread_mutex_unlock(&lock);
    return s;
}

Stream *stream_of(void *handle) {
    if ((u64)handle > 2) return handle;
    int d = current_device();
    pthread_mutex_lock(&lock);
    Stream *s = defaults[d];
    pthread_mutex_unlock(&lock);
    if (!s) {
        s = stream_new(d, 0, 0);
        defaults[d] = s;
    }
    return s;
}

static bool at_once(const Stream *s) { return !settings.late || s == defaults[s->device]; }

int stream_add_get(Stream *s, Op *o, u64 *seq) {
    int e = device_error(s->device);
    if (e) {
        op_end(o);
        return e;
    }
    if (graph_takes(s, o)) {
        *seq = s->enqueued;
        return CU_OK;
    }
    if (at_once(s)) { /* operations of several threads one after the other */
        pthread_mutex_lock(&s->running);
        if (settings.late) stream_wait_all(s->device);
        if ((e = o->run(o))) device_fail(s->device, e);
        *seq = ++s->enqueued;
        s->completed = s->enqueued;
        pthread_mutex_unlock(&s->running);
        op_end(o);
        return e;
    }
    pthread_mutex_lock(&lock);
    *seq = o->seq = ++s->enqueued;
    o->due = now_ns() + (u64)settings.late * 1000000ull;
    if (s->tail) s->tail->next = o;
    else s->head = o;
    s->tail = o;
    if (!s->threaded) {
        s->threaded = true;
        pthread_create(&s->thread, NULL, serve, s);
        pthread_detach(s->thread);
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return CU_OK;
}
int stream_add(Stream *s, Op *o) {
    u64 seq;
    return stream_add_get(s, o, &seq);
}

int stream_wait(Stream *s, u64 seq) {
    if (at_once(s)) {
        pthread_mutex_lock(&s->running);
        pthread_mutex_unlock(&s->running);
        return device_error(s->device);
    }
    pthread_mutex_lock(&lock);
    if (seq > s->forced) s->forced = seq;
    pthread_cond_broadcast(&changed);
    while (s->completed < seq) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return device_error(s->device);
}

int stream_wait_all(int device) {
    for (Stream *s = streams; s; s = s->next)
        if (s->device == device && !(settings.late && at_once(s))) stream_wait(s, s->enqueued);
    return device_error(device);
}

/* ---- the driver's functions ---------------------------------------------------------------------------------------- */
API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    *out = stream_new(current_device(), flags, priority);
    return CU_OK;
}
API int cuStreamCreate(void **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }
API int cuStreamDestroy_v2(void *h) { /* work in it goes on */
    Stream *s = h;
    pthread_mutex_lock(&lock);
    s->gone = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return CU_OK;
}
API int cuStreamDestroy(void *h) { return cuStreamDestroy_v2(h); }
API int cuStreamSynchronize(void *h) {
    Stream *s = stream_of(h);
    int e = graph_forbids();
    if (e) return e;
    counts.waits++;
    return stream_wait(s, s->enqueued);
}
API int cuStreamQuery(void *h) {
    Stream *s = stream_of(h);
    int e = device_error(s->device);
    return e ? e : s->completed >= s->enqueued ? CU_OK : CU_NOT_READY;
}
API int cuStreamGetCtx(void *h, void **ctx) {
    *ctx = (void *)(u64)(0x1000 + stream_of(h)->device);
    return CU_OK;
}
API int cuStreamGetPriority(void *h, int *p) {
    *p = stream_of(h)->priority;
    return CU_OK;
}
API int cuCtxSynchronize(void) {
    counts.waits++;
    return stream_wait_all(current_device());
}

static int run_host(Op *o) {
    o->host(o->user);
    return CU_OK;
}
API int cuLaunchHostFunc(void *h, void (*fn)(void *), void *user) {
    Op *o = op_new(run_host);
    o->host = fn, o->user = user;
    return stream_add(stream_of(h), o);
}

API int cuEventCreate(void **out, unsigned flags) {
    Event *e = calloc(1, sizeof *e);
    e->flags = flags, e->device = current_device();
    *out = e;
    return CU_OK;
}
static int run_record(Op *o) {
    o->event->time = now_ns();
    return CU_OK;
}
API int cuEventRecord(void *ev, void *h) {
    Event *e = ev;
    Stream *s = stream_of(h);
    Op *o = op_new(run_record);
    o->event = e;
    u64 seq = 0;
    int r = stream_add_get(s, o, &seq);
    e->seq = seq, e->stream = s;
    return r;
}
API int cuEventRecordWithFlags(void *ev, void *h, unsigned flags) {
    (void)flags;
    return cuEventRecord(ev, h);
}
static int run_wait(Op *o) { return stream_wait(o->other, o->value); }
API int cuStreamWaitEvent(void *h, void *ev, unsigned flags) {
    Event *e = ev;
    Stream *s = stream_of(h);
    (void)flags;
    if (!e->stream || e->stream == s) return CU_OK; /* never recorded, or in order anyway */
    if (at_once(e->stream)) return CU_OK;           /* it is done */
    Op *o = op_new(run_wait);
    o->other = e->stream, o->value = e->seq;
    return stream_add(s, o);
}
API int cuEventSynchronize(void *ev) {
    Event *e = ev;
    counts.waits++;
    return e->stream ? stream_wait(e->stream, e->seq) : CU_OK;
}
API int cuEventQuery(void *ev) {
    Event *e = ev;
    if (!e->stream) return CU_OK;
    int r = device_error(e->stream->device);
    return r ? r : e->stream->completed >= e->seq ? CU_OK : CU_NOT_READY;
}
API int cuEventElapsedTime(float *ms, void *a, void *b) {
    *ms = (float)((double)(s64)(((Event *)b)->time - ((Event *)a)->time) * 1e-6);
    return CU_OK;
}
API int cuEventElapsedTime_v2(float *ms, void *a, void *b) { return cuEventElapsedTime(ms, a, b); }
API int cuEventDestroy_v2(void *ev) {
    (void)ev; /* a recorded operation may still write its time */
    return CU_OK;
}
API int cuEventDestroy(void *ev) { return cuEventDestroy_v2(ev); }
