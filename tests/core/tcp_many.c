/* Messages over one TCP link (transports/_core/tcp) of which very many are accepted before the
   first is written, and of which very many are then taken back.

   tcp_many MESSAGES

   exits with 3 if one is missing. Each that waits must cost the same however many there are: a
   limit on the time of the processor, far above that, ends it otherwise. */
#include "tcp/tcp.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>

enum { SECONDS = 20 };

static struct pc_tcp ends[2];
static uint64_t *sends;
static unsigned char byte = 7, *received;
static size_t num_offered, num_received, num_sent, num_cancelled;

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes,
                    const void *payload, size_t nbytes) {
    (void)owner, (void)peer, (void)header, (void)header_nbytes, (void)payload, (void)nbytes;
}

static void offered(void *owner, int peer, const void *header, size_t header_nbytes,
                    uint64_t nbytes, uint64_t id) {
    (void)header, (void)header_nbytes;
    pc_tcp_accept(owner, peer, id, received + num_offered++, (size_t)nbytes, NULL);
}

static void pushed(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes,
                   uint64_t handle) {
    (void)owner, (void)peer, (void)header, (void)header_nbytes, (void)nbytes, (void)handle;
}

static void sent(void *owner, uint64_t id, void *memory) {
    (void)owner, (void)id, (void)memory;
    num_sent++;
}

static void has_received(void *owner, uint64_t handle) {
    (void)owner, (void)handle;
    num_received++;
}

static void cancelled(void *owner, int peer, uint64_t id) {
    (void)owner, (void)peer, (void)id;
    num_cancelled++;
}

static void bye(void *owner, int peer) { (void)owner, (void)peer; }
static void lost(void *owner, int peer, const char *why) {
    (void)owner, (void)peer;
    fprintf(stderr, "a link was lost: %s\n", why);
    exit(3);
}
static void nothing(void *owner) { (void)owner; }
static void release(void *owner, void *memory) { (void)owner, (void)memory; }

static const struct pc_tcp_up up = {arrived, offered, pushed,  sent,    has_received, cancelled,
                                    bye,     lost,    nothing, release, NULL};

static void check(int holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(3);
}

static void send_all(size_t many) {
    for (size_t each = 0; each < many; each++) {
        struct pc_tcp_send *send = calloc(1, sizeof *send);
        send->peer = 1;
        send->nbytes = 1;
        send->parts = malloc(sizeof *send->parts);
        send->parts[0] = (struct iovec){&byte, 1};
        send->num_parts = 1;
        int64_t id = pc_tcp_offer(&ends[0], send, "header", 6);
        check(id > 0, "a message cannot be offered");
        sends[each] = (uint64_t)id;
    }
}

int main(int argc, char **argv) {
    size_t many = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    struct rlimit limit = {SECONDS, SECONDS};
    setrlimit(RLIMIT_CPU, &limit);
    sends = calloc(many, sizeof *sends);
    received = calloc(2 * many, 1);
    int pair[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "there is no socket");
    for (int end = 0; end < 2; end++) {
        ends[end] = (struct pc_tcp){.rank = end,
                                    .size = 2,
                                    .num_lanes = 1,
                                    .limits = {1024, 1024, 4096, 64},
                                    .up = &up,
                                    .owner = &ends[end]};
        check(pc_tcp_open(&ends[end]) == 0, "it cannot be opened");
        check(pc_tcp_attach(&ends[end], 1 - end, 0, pair[end]) == 0, "it cannot be linked");
    }
    send_all(many);
    /* nothing is written of what was accepted: the owner has not handled yet what he was told */
    while (num_offered < many || ends[1].behind > 0 || ends[0].behind > 0) {
        ends[0].has_unhandled = true;
        pc_tcp_progress(&ends[1]);
        pc_tcp_progress(&ends[0]);
    }
    ends[0].has_unhandled = false;
    pc_tcp_write_granted(&ends[0]);
    while (num_received < many) {
        pc_tcp_progress(&ends[0]);
        pc_tcp_progress(&ends[1]);
    }
    check(num_sent == many, "a send has not ended");
    for (size_t each = 0; each < many; each++)
        check(received[each] == byte, "a byte is wrong");
    /* What was only offered stands behind all others in the lane when it is taken back. */
    send_all(many);
    for (size_t each = 0; each < many; each++)
        pc_tcp_take_back(&ends[0], sends[each]);
    while (num_cancelled < many) {
        pc_tcp_progress(&ends[0]);
        pc_tcp_progress(&ends[1]);
    }
    for (int end = 0; end < 2; end++)
        pc_tcp_free(&ends[end]);
    free(sends);
    free(received);
    printf("%zu messages\n", many);
    return 0;
}
