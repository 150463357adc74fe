/* Feeds bytes of a stranger's choice to a link over TCP (transports/_core/tcp), and looks for new
   inputs by coverage.

       tcp_fuzz INPUT...                     run each input once
       tcp_fuzz --fuzz SECONDS SEED FOLDER   change the inputs of the folder at random; keep those
   that reach more

   An input is a program: its first byte says how many lanes there are, then each step has a byte
   that says what it does, and a step that writes has the number of bytes and the bytes. So the
   fuzzer cuts frames anywhere, and chooses what the rank does meanwhile: accept, place, give up,
   redirect, send, take back. What is in a frame is all its own, too; numbers of sends and receives
   are the same each time, so that it can guess them.

   The sources are built with -fsanitize-coverage=trace-pc, which GCC has, and this file is not. An
   input that is found to do harm is written to FOLDER/harm, or with inputs given, named; the exit
   status is 3, or AddressSanitizer's. */
#include "tcp_hooks.h"

#include "tcp/tcp.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_INPUT 4096
#define MOST_INPUTS 4000
#define MOST_PENDING 16

/* --- coverage --------------------------------------------------------------------------------- */

#define MAP ((size_t)1 << 14)
static unsigned char map[MAP], seen[MAP];
static size_t previous;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    size_t place = (size_t)__builtin_return_address(0);
    place = (place ^ place >> 14) & (MAP - 1);
    unsigned char *times = &map[(place ^ previous) & (MAP - 1)];
    if (*times < 255)
        ++*times;
    previous = place >> 1;
}

static unsigned char magnitude(unsigned char times) {
    return times == 0 ? 0 : times == 1 ? 1 : times == 2 ? 2 : times < 8 ? 4 : times < 32 ? 8 : 16;
}

/* Whether the last run has reached what none before has. */
static bool is_new(void) {
    bool new = false;
    for (size_t place = 0; place < MAP; place++) {
        unsigned char bit = magnitude(map[place]);
        new = new || (bit & ~seen[place]);
        seen[place] |= bit;
    }
    return new;
}

/* --- one input -------------------------------------------------------------------------------- */

static unsigned char input[MOST_INPUT];
static size_t input_nbytes;
static const char *folder;

static void keep(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = folder != NULL ? fopen(path, "wb") : NULL;
    if (file == NULL)
        return;
    fwrite(input, 1, input_nbytes, file);
    fclose(file);
}

static void died(void) { keep("harm"); }
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void check(bool holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    keep("harm");
    exit(3);
}

/* What waits for the rank to do something with it. */
struct pending {
    uint64_t number, nbytes;
    bool pushed, accepted;
};
static struct pending pending[MOST_PENDING];
static size_t num_pending;
static int64_t owners;
static int lost_times, bye_times;
static uint64_t held;

/* The owner of memory is that memory. */
static void *allot(size_t nbytes) {
    owners++;
    return calloc(1, nbytes + 1);
}

static void add(uint64_t number, uint64_t nbytes, bool is_pushed) {
    if (num_pending == MOST_PENDING) {
        memmove(pending, pending + 1, sizeof pending - sizeof *pending);
        num_pending--;
    }
    pending[num_pending++] = (struct pending){number, nbytes, is_pushed, false};
}

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes,
                    const void *payload, size_t nbytes) {
    (void)owner, (void)peer;
    unsigned char copy[PC_TCP_LONGEST_HEADER + 4096];
    memcpy(copy, header, header_nbytes);
    memcpy(copy + header_nbytes, payload, nbytes);
    held += nbytes;
    add(0, nbytes, false);
}
static void offered(void *owner, int peer, const void *header, size_t header_nbytes,
                    uint64_t nbytes, uint64_t id) {
    (void)owner, (void)peer;
    unsigned char copy[PC_TCP_LONGEST_HEADER];
    memcpy(copy, header, header_nbytes);
    add(id, nbytes, false);
}
static void pushed(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes,
                   uint64_t handle) {
    (void)owner, (void)peer;
    unsigned char copy[PC_TCP_LONGEST_HEADER];
    memcpy(copy, header, header_nbytes);
    add(handle, nbytes, true);
}
static void sent(void *owner, uint64_t id, void *memory) { (void)owner, (void)id, (void)memory; }
static void received(void *owner, uint64_t handle) {
    (void)owner;
    for (size_t index = 0; index < num_pending; index++)
        if (pending[index].number == handle && (pending[index].pushed || pending[index].accepted))
            pending[index].number = 0;
}
static void cancelled(void *owner, int peer, uint64_t id) { (void)owner, (void)peer, (void)id; }
static void bye(void *owner, int peer) { (void)owner, (void)peer, bye_times++; }
static void lost(void *owner, int peer, const char *why) {
    (void)owner, (void)peer, (void)why, lost_times++;
}
static void watched(void *owner) { (void)owner; }
static void release(void *owner, void *memory) {
    (void)owner;
    owners--;
    free(memory);
}
static const struct pc_tcp_up up = {arrived, offered, pushed,  sent,    received, cancelled,
                                    bye,     lost,    watched, release, NULL};

static void send_something(struct pc_tcp *tcp, unsigned char what) {
    size_t sizes[] = {0, 100, 251, 3000};
    struct pc_tcp_send *send = calloc(1, sizeof *send);
    size_t nbytes = sizes[what % 4];
    *send = (struct pc_tcp_send){
        .peer = 1, .nbytes = nbytes, .parts = malloc(sizeof(struct iovec)), .num_parts = 1};
    send->owner = allot(nbytes);
    send->parts[0] = (struct iovec){send->owner, nbytes};
    if (what & 4)
        pc_tcp_offer(tcp, send, "header", 6);
    else
        pc_tcp_send(tcp, send, "header", 6, what & 8);
}

static void act(struct pc_tcp *tcp, unsigned char what) {
    struct pending *one = num_pending > 0 ? &pending[(what >> 4) % num_pending] : NULL;
    uint64_t id = (uint64_t)(1 + (what >> 6)) << 20 | (what >> 4 & 3);
    switch (what % 8) {
    case 0: /* accept or place */
        if (one == NULL || one->accepted || one->number == 0 || one->nbytes > 8000)
            return;
        void *into = allot(one->nbytes);
        one->accepted = true;
        if (one->pushed) {
            if (pc_tcp_place(tcp, one->number, into, into) ||
                pc_table_get(&tcp->receives, one->number) == NULL)
                release(NULL, into);
        } else {
            int64_t handle = pc_tcp_accept(tcp, 1, one->number, into, one->nbytes, into);
            if (handle <= 0)
                release(NULL, into);
            one->number = (uint64_t)handle;
        }
        return;
    case 1: /* redirect */
        if (one != NULL && one->accepted && pc_table_get(&tcp->receives, one->number) != NULL) {
            void *elsewhere = allot(one->nbytes);
            pc_tcp_redirect(tcp, one->number, elsewhere, elsewhere);
        }
        return;
    case 2: /* give up */
        if (one != NULL && (one->accepted || one->pushed))
            pc_tcp_give_up(tcp, one->number);
        else if (one != NULL)
            pc_tcp_drop(tcp, 1, one->number);
        return;
    case 3:
        if (held > 0 && one != NULL && one->number == 0 && !one->accepted && held >= one->nbytes) {
            held -= one->nbytes;
            pc_tcp_consumed(tcp, 1, one->nbytes);
            one->accepted = true;
        }
        return;
    case 4:
        pc_tcp_stop(tcp, id);
        return;
    case 5:
        pc_tcp_take_back(tcp, id);
        return;
    default:
        send_something(tcp, what >> 3);
    }
}

static void go_on(struct pc_tcp *tcp, int fds[2]) {
    unsigned char thrown[4096];
    for (int turn = 0; turn < 4; turn++)
        pc_tcp_progress(tcp);
    for (int lane = 0; lane < 2; lane++)
        while (fds[lane] >= 0 && recv(fds[lane], thrown, sizeof thrown, MSG_DONTWAIT) > 0)
            continue;
    struct pc_tcp_peer *peer = &tcp->peers[1];
    check(peer->lost || (peer->held[0] <= tcp->limits.credit && peer->held[1] <= tcp->limits.ahead),
          "more is held than there is credit for");
    check(peer->owed[1] <= tcp->limits.ahead, "the credit is more than there is");
    check(lost_times + bye_times <= 2 && lost_times <= 1 && bye_times <= 1, "an end is told twice");
}

static void run(void) {
    int fds[2] = {-1, -1}, lanes = input_nbytes > 0 && (input[0] & 1) ? 2 : 1;
    struct pc_tcp tcp = {
        .rank = 0,
        .size = 2,
        .num_lanes = lanes,
        .up = &up,
        .limits = {.eager = 250, .ahead = 6000, .credit = 2000, .message_cost = 20}};
    tcp.owner = &tcp;
    num_pending = 0;
    owners = lost_times = bye_times = 0;
    held = 0;
    previous = 0;
    memset(map, 0, sizeof map);
    check(pc_tcp_open(&tcp) == 0, "it cannot be opened");
    for (int lane = 0; lane < lanes; lane++) {
        int pair[2];
        check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "no sockets");
        fds[lane] = pair[1];
        check(pc_tcp_attach(&tcp, 1, lane, pair[0]) == 0, "it cannot be attached");
    }
    for (size_t at = 1; at < input_nbytes;) {
        unsigned char what = input[at++];
        int lane = (what & 4) && lanes > 1;
        switch (what & 3) {
        case 0: case 1: { /* write */
            size_t nbytes = at < input_nbytes ? input[at++] : 0;
            if (nbytes > input_nbytes - at)
                nbytes = input_nbytes - at;
            if (fds[lane] >= 0 && send(fds[lane], input + at, nbytes, MSG_NOSIGNAL) < 0)
                break;
            at += nbytes;
            if (what & 1)
                go_on(&tcp, fds);
            break;
        }
        case 2: /* act */
            if (at < input_nbytes)
                act(&tcp, input[at++]);
            break;
        default: /* many zeros, or the end of a connection */
            if (what >= 0xF0 && fds[lane] >= 0) {
                close(fds[lane]);
                fds[lane] = -1;
            } else if (fds[lane] >= 0) {
                unsigned char zeros[2048] = {0};
                (void)!send(fds[lane], zeros, (size_t)(what >> 3) << 6, MSG_NOSIGNAL);
            }
            go_on(&tcp, fds);
        }
    }
    go_on(&tcp, fds);
    if (input_nbytes > 0 && (input[0] & 2))
        pc_tcp_forget(&tcp, 1);
    if (input_nbytes > 0 && (input[0] & 4)) {
        pc_tcp_say_goodbye(&tcp);
        pc_tcp_flush(&tcp);
    }
    for (int lane = 0; lane < 2; lane++)
        if (fds[lane] >= 0)
            close(fds[lane]);
    pc_tcp_progress(&tcp);
    pc_tcp_free(&tcp);
    check(owners == 0, "memory is not given back");
    check(tcp.behind == 0 && tcp.restless == 0, "something is left to do");
}

/* --- looking for inputs ----------------------------------------------------------------------- */

static struct kept {
    unsigned char *bytes;
    size_t nbytes;
} inputs[MOST_INPUTS];
static size_t num_inputs;
static uint64_t random_state;

static uint64_t below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static void remember(void) {
    if (num_inputs == MOST_INPUTS)
        return;
    unsigned char *bytes = malloc(input_nbytes + 1);
    memcpy(bytes, input, input_nbytes);
    inputs[num_inputs++] = (struct kept){bytes, input_nbytes};
}

static void insert(size_t at, const void *bytes, size_t nbytes) {
    if (input_nbytes + nbytes > MOST_INPUT)
        return;
    memmove(input + at + nbytes, input + at, input_nbytes - at);
    memcpy(input + at, bytes, nbytes);
    input_nbytes += nbytes;
}

/* A step that writes a frame that may make sense. */
static void insert_frame(size_t at) {
    struct pc_tcp_frame frame = {.kind = 1 + below(9),
                                 .header = below(4) ? 0 : (uint32_t)below(20)};
    uint64_t values[] = {0,   1,    100,  251,        699,       700,
                         701, 3000, 6000, UINT32_MAX, INT64_MAX, UINT64_MAX};
    frame.nbytes = (uint32_t)values[below(12)];
    frame.id = below(4) ? (1 + below(4)) << 20 | below(3) : values[below(12)];
    frame.value = below(3) ? values[below(12)] : (1 + below(4)) << 20 | below(3);
    unsigned char step[2 + sizeof frame] = {(unsigned char)(below(8) & ~2u), sizeof frame};
    memcpy(step + 2, &frame, sizeof frame);
    insert(at, step, sizeof step);
}

static void mutate(void) {
    for (uint64_t times = 1 + below(6); times > 0; times--) {
        size_t at = below(input_nbytes + 1), rest = input_nbytes - at;
        switch (below(8)) {
        case 0:
            if (rest > 0)
                input[at] ^= (unsigned char)(1 << below(8));
            break;
        case 1:
            if (rest > 0)
                input[at] = (unsigned char)below(256);
            break;
        case 2: {
            size_t nbytes = below((rest < 40 ? rest : 40) + 1);
            memmove(input + at, input + at + nbytes, rest - nbytes);
            input_nbytes -= nbytes;
            break;
        }
        case 3: case 4:
            insert_frame(at);
            break;
        case 5: {
            unsigned char step[2] = {2, (unsigned char)below(256)};
            insert(at, step, sizeof step);
            break;
        }
        case 6: {
            unsigned char step = (unsigned char)(below(32) << 3 | below(2) << 2 | 3);
            insert(at, &step, 1);
            break;
        }
        default:
            if (num_inputs > 0) {
                struct kept *other = &inputs[below(num_inputs)];
                size_t from = below(other->nbytes + 1), most = other->nbytes - from;
                insert(at, other->bytes + from, below((most < 200 ? most : 200) + 1));
            }
        }
    }
}

static bool load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return false;
    input_nbytes = fread(input, 1, sizeof input, file);
    fclose(file);
    return true;
}

static int fuzz(double seconds) {
    char path[4096];
    DIR *entries = opendir(folder);
    check(entries != NULL, "there is no such folder");
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] == '.' || !load(path))
            continue;
        run();
        is_new();
        remember();
    }
    closedir(entries);
    if (num_inputs == 0) {
        input_nbytes = 1;
        remember();
    }
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    uint64_t runs = 0;
    size_t before = num_inputs;
    do {
        struct kept *one = &inputs[below(num_inputs)];
        memcpy(input, one->bytes, one->nbytes);
        input_nbytes = one->nbytes;
        mutate();
        run();
        runs++;
        if (is_new()) {
            snprintf(path, sizeof path, "found-%05zu", num_inputs);
            keep(path);
            remember();
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) <
             seconds);
    size_t reached = 0;
    for (size_t place = 0; place < MAP; place++)
        reached += seen[place] != 0;
    printf("runs %llu, inputs %zu, new %zu, reached %zu\n", (unsigned long long)runs, num_inputs,
           num_inputs - before, reached);
    return 0;
}

int main(int count, char **arguments) {
    if (__sanitizer_set_death_callback != NULL)
        __sanitizer_set_death_callback(died);
    if (count == 5 && strcmp(arguments[1], "--fuzz") == 0) {
        random_state = strtoull(arguments[3], NULL, 10);
        folder = arguments[4];
        return fuzz(strtod(arguments[2], NULL));
    }
    for (int index = 1; index < count; index++) {
        check(load(arguments[index]), "there is no such input");
        fprintf(stderr, "%s\n", arguments[index]); /* the last one named is the culprit */
        run();
        is_new();
    }
    size_t reached = 0;
    for (size_t place = 0; place < MAP; place++)
        reached += seen[place] != 0;
    printf("runs %d, reached %zu\n", count - 1, reached);
    return 0;
}
