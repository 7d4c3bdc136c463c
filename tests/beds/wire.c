/* Wires between pairs of network devices, with a rate, a delay and loss, in user space: for kernels without netem.

       wire RATE_BITS_PER_SECOND DELAY_MICROSECONDS LOSS A:B [A:B ...]

   Each direction of each pair has the rate, and a queue of 100 ms (at least 256 KiB) behind which packets are dropped,
   as a switch's. What it prints once all devices are open: "ready". It runs with a real-time priority where it may, or a
   busy machine would add its own delays. Packets keep their headers of offload (PACKET_VNET_HDR), so a chunk of a TCP
   stream may pass as one; it is lost with the probability that one of its segments is. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define HEADER 10 /* of struct virtio_net_hdr */
#define LARGEST (HEADER + 66000)
#define PAIRS 64

typedef struct Packet {
    struct Packet *next;
    double due;
    long length;
    char data[];
} Packet;

typedef struct {
    int from, to;
    double free_at; /* when the wire has sent all that it took */
    Packet *first, *last;
} Direction;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int opened(const char *name) {
    int one = 1, room = 16 << 20, s = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
    struct sockaddr_ll place = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
    if (s < 0 || !place.sll_ifindex || setsockopt(s, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one) ||
        setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one) ||
        setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room) ||
        setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) || bind(s, (void *)&place, sizeof place)) {
        fprintf(stderr, "wire: %s: %s\n", name, strerror(errno));
        exit(1);
    }
    return s;
}

int main(int count, char **words) {
    static Direction all[2 * PAIRS];
    static char data[LARGEST];
    if (count < 5 || count - 4 > PAIRS) {
        fprintf(stderr, "wire RATE DELAY LOSS A:B [A:B ...]\n");
        return 2;
    }
    double rate = atof(words[1]) / 8, delay = 1e-6 * atof(words[2]), loss = atof(words[3]);
    double patience = rate * 0.1 < (256 << 10) ? (256 << 10) / rate : 0.1;
    int directions = 2 * (count - 4);
    struct pollfd ready[2 * PAIRS + 1];
    for (int i = 0; i < directions; i += 2) {
        char *a = words[4 + i / 2], *b = strchr(a, ':');
        *b++ = 0;
        all[i].from = all[i + 1].to = opened(a);
        all[i].to = all[i + 1].from = opened(b);
    }
    for (int i = 0; i < directions; i++)
        ready[i] = (struct pollfd){all[i].from, POLLIN, 0};
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    ready[directions] = (struct pollfd){timer, POLLIN, 0};
    srand48(1);
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){10});
    puts("ready");
    fflush(stdout);
    for (;;) {
        double next = 0, at = now();
        for (int i = 0; i < directions; i++) {
            Direction *d = &all[i];
            while (d->first && d->first->due <= at) {
                Packet *p = d->first;
                if (send(d->to, p->data, p->length, 0) < 0 && errno == ENOBUFS)
                    break;
                d->first = p->next;
                free(p);
            }
            if (d->first && (!next || d->first->due < next))
                next = d->first->due > at ? d->first->due : at + 1e-4;
        }
        struct itimerspec when = {{0, 0}, {(time_t)next, (long)(1e9 * (next - (time_t)next))}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, 0);
        if (poll(ready, directions + 1, -1) < 0)
            return 1;
        at = now();
        for (int i = 0; i < directions; i++) {
            Direction *d = &all[i];
            for (int k = 0; k < 64 && ready[i].revents; k++) { /* the error of a device that is gone is taken, too */
                long length = recv(d->from, data, LARGEST, 0);
                if (length <= HEADER)
                    break;
                struct virtio_net_hdr *offload = (void *)data;
                int segments = offload->gso_size ? (length + offload->gso_size - 1) / offload->gso_size : 1;
                int gone = 0;
                for (int s = 0; s < segments && loss > 0; s++)
                    gone |= drand48() < loss;
                double starts = d->free_at > at ? d->free_at : at;
                if (gone || starts - at > patience)
                    continue;
                d->free_at = starts + (length - HEADER + 78.0 * (segments - 1) + 24) / rate; /* headers, preamble, gap */
                Packet *p = malloc(sizeof *p + length);
                *p = (Packet){0, d->free_at + delay, length};
                memcpy(p->data, data, length);
                if (d->first)
                    d->last->next = p;
                else
                    d->first = p;
                d->last = p;
            }
        }
        long fired;
        if (read(timer, &fired, sizeof fired) < 0 && errno != EAGAIN)
            return 1;
    }
}
