/* Streams and events of the emulated driver. */
#ifndef STREAM_H
#define STREAM_H
#include "emulator.h"

typedef struct Op Op;
struct Op {
    int (*run)(Op *);
    u64 seq, due;
    Op *next;
    u64 dst, src, n, value, width;
    void *staged; /* freed after the operation */
    void (*host)(void *);
    void *user;
    Launch launch;
    struct Stream *other;
    struct Event *event;
};
typedef struct Stream {
    int device, priority;
    u32 flags;
    Op *head, *tail;
    u64 enqueued, completed, forced;
    pthread_t thread;
    pthread_mutex_t running; /* while an operation runs inside a call */
    bool threaded, gone;
    pid_t pid;
    void *capture; /* a graph that is being made of what is enqueued (graph.c) */
    u64 capture_id;
    struct Stream *next;
} Stream;
typedef struct Event {
    Stream *stream;
    u64 seq, time;
    u32 flags;
    int device;
} Event;

Op *op_new(int (*run)(Op *));
void op_end(Op *o);
bool graph_takes(Stream *s, Op *o); /* while it captures: keeps the operation */
int graph_forbids(void);            /* what cannot be captured asks: an error while this thread captures */
int stream_add(Stream *s, Op *o); /* runs it at once, or late */
int stream_add_get(Stream *s, Op *o, u64 *seq); /* and its number in the stream */
int stream_wait(Stream *s, u64 seq);
int stream_wait_all(int device);
Stream *stream_new(int device, u32 flags, int priority);
Stream *stream_of(void *handle); /* NULL: the device's default stream */
int device_error(int device);
void device_fail(int device, int error);
int current_device(void);
u64 now_ns(void);
#endif
