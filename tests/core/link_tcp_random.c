/* Random calls of engines that are joined by the link over sockets (transports/_core/engine/link_tcp), in one thread.

   Messages of all sizes go all ways; sends are taken back, receives given up at any moment (memory is freed at once:
   AddressSanitizer sees who touches it), contexts are opened late and broken, peers forgotten. Every byte is checked,
   and that what was sent comes once, and, if nothing was broken, all of it; then one rank says goodbye.

   link_tcp_random WORLDS SEED */
#include "engine/engine.h"
#include "engine/link_tcp.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RANKS 2
#define IDENTS 2
#define STEPS 500
#define MOST 600
#define LARGEST 9000

enum count { RECEIVED, BUFFERED, UNDER_WAY, CANCELLED, GIVEN_UP, PARKED, WANTED, WATCHED, BROKEN, FORGOTTEN, FINISHED,
             FROM_CALLBACKS, COUNTS };
static const char *const names[] = {"received", "buffered", "under way", "cancelled", "given up", "parked", "wanted",
                                    "watched", "broken", "forgotten", "finished", "from callbacks"};
static uint64_t counts[COUNTS], seed, random_state;

static void check(bool holds, const char *what, uint64_t number) {
    if (holds)
        return;
    fprintf(stderr, "world %llu: %s (%llu)\n", (unsigned long long)seed, what, (unsigned long long)number);
    exit(3);
}

static uint64_t below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

struct rank {
    struct pc_engine engine;
    struct pc_link_tcp link;
    struct pc_link *links[RANKS];
    struct pc_context *contexts[IDENTS];
    bool finished, lost;
};
struct message {
    struct pc_send send;
    int source, ident;
    size_t nbytes;
    unsigned char *memory;
    struct iovec parts[2];
    bool cancelled, came;
};
struct receive {
    struct pc_receive receive;
    int rank;
    unsigned char *memory;
};

static struct rank ranks[RANKS];
static struct message messages[MOST];
static struct receive receives[4 * MOST];
static uint32_t num_messages, num_receives;
static int num_lanes, pipes[2];
static bool attached, severed;

static unsigned char byte_of(uint32_t number, size_t offset) {
    return (unsigned char)(number * 131 + offset * 7 + offset / 251);
}

static void over(struct message *message) {
    free(message->memory);
    message->memory = NULL;
}

static void ended(struct pc_send *send) { over(send->owner); }

static void told(struct pc_receive *receive) {
    struct receive *mine = receive->owner;
    if (receive->status == 0) {
        uint32_t number = (uint32_t)receive->tag;
        struct message *message = &messages[number];
        check(number < num_messages && !message->came, "a message comes twice", number);
        check(receive->source == message->source && receive->nbytes == message->nbytes, "it is another one", number);
        for (size_t offset = 0; offset < receive->nbytes; offset++)
            check(mine->memory[offset] == byte_of(number, offset), "a byte is wrong", number);
        message->came = true;
        counts[RECEIVED]++;
    }
    free(mine->memory);
    mine->memory = NULL;
}

static void post(int rank, int ident) {
    if (ranks[rank].contexts[ident] == NULL || num_receives == 4 * MOST)
        return;
    struct receive *mine = &receives[num_receives++];
    *mine = (struct receive){.rank = rank, .memory = malloc(LARGEST)};
    mine->receive = (struct pc_receive){.into = mine->memory, .room = LARGEST, .told = told, .owner = mine};
    mine->receive.posted.queued.source = mine->receive.posted.queued.tag = PC_ANY;
    pc_receive_start(ranks[rank].contexts[ident], &mine->receive);
}

static void send_one(int source) {
    int ident = (int)below(IDENTS);
    if (ranks[source].contexts[ident] == NULL || num_messages == MOST)
        return;
    uint32_t number = num_messages++;
    struct message *message = &messages[number];
    size_t most[] = {90, 900, LARGEST};
    size_t nbytes = below(most[below(3)] + 1), first = below(nbytes + 1);
    *message = (struct message){.source = source, .ident = ident, .nbytes = nbytes, .memory = malloc(nbytes + 1)};
    for (size_t offset = 0; offset < nbytes; offset++)
        message->memory[offset] = byte_of(number, offset);
    message->parts[0] = (struct iovec){message->memory, first};
    message->parts[1] = (struct iovec){message->memory + first, nbytes - first};
    message->send = (struct pc_send){
        .peer = !source, .parts = message->parts, .num_parts = 2, .ended = ended, .owner = message};
    unsigned char header[PC_P2P_NBYTES];
    pc_p2p_header(header, (uint64_t)ident + 5, number, 0);
    if (pc_send_start(ranks[source].contexts[ident], &message->send, header, sizeof header, below(3)) == PC_SENT) {
        check(message->send.status == 0 || severed, "a send fails", number);
        over(message);
        counts[BUFFERED]++;
    } else {
        counts[UNDER_WAY]++;
    }
}

static void attach(void) {
    for (int lane = 0; !attached && lane < num_lanes; lane++) {
        int fds[2], room = 4096;
        check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0, "no sockets", 0);
        for (int side = 0; side < 2; side++) {
            setsockopt(fds[side], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
            check(pc_tcp_attach(&ranks[side].link.tcp, !side, lane, fds[side]) == 0, "it is not attached", 0);
        }
    }
    attached = true;
}

static void wanted(void *owner, int peer) {
    check(peer != (int)((struct rank *)owner - ranks), "a link to itself is wanted", 0);
    counts[WANTED]++;
}
static void watched(void *owner) {
    char byte;
    (void)owner;
    counts[WATCHED] += read(pipes[0], &byte, 1) == 1;
}
static void finished(struct pc_engine *engine, int peer) {
    ((struct rank *)engine->owner)->finished = true;
    counts[FINISHED]++;
    pc_engine_forget(engine, peer, 9);
    counts[FROM_CALLBACKS]++;
}
static void lost(struct pc_engine *engine, int peer, const char *why) {
    check(severed || ranks[!((struct rank *)engine->owner - ranks)].finished || attached, why, 0);
    ((struct rank *)engine->owner)->lost = true;
    severed = true;
    pc_engine_forget(engine, peer, 8);
}

static void progress(int rank) {
    struct pc_source *source = &ranks[rank].link.source;
    source->ops->progress(source);
}

static void open_context(int rank, int ident) {
    static const int members[RANKS] = {0, 1};
    if (ranks[rank].contexts[ident] == NULL)
        ranks[rank].contexts[ident] = pc_context_open(&ranks[rank].engine, (uint64_t)ident + 5, members, RANKS, rank);
}

static void step(bool may_break) {
    int rank = (int)below(RANKS);
    struct receive *mine = num_receives > 0 ? &receives[below(num_receives)] : NULL;
    struct message *message = num_messages > 0 ? &messages[below(num_messages)] : NULL;
    switch (below(12)) {
    case 0: case 1: case 2:
        send_one(rank);
        break;
    case 3: case 4:
        post(rank, (int)below(IDENTS));
        break;
    case 5:
        if (mine == NULL || mine->memory == NULL)
            break;
        counts[PARKED] += mine->receive.state == PC_RECEIVE_READING;
        if (pc_receive_give_up(&mine->receive)) {
            counts[GIVEN_UP]++;
            free(mine->memory);
            mine->memory = NULL;
        }
        break;
    case 6:
        if (message != NULL && message->memory != NULL && pc_send_stop(&message->send) && pc_send_take_back(&message->send)) {
            message->cancelled = true;
            over(message);
            counts[CANCELLED]++;
        }
        break;
    case 7:
        if (below(20) == 0) {
            attach();
            open_context(rank, 1);
        }
        if (below(20) == 0)
            check(write(pipes[1], "x", 1) == 1, "the pipe is full", 0);
        if (may_break && below(60) == 0 && ranks[rank].contexts[0] != NULL) {
            severed = true;
            pc_context_break(ranks[rank].contexts[0], 7);
            counts[BROKEN]++;
        }
        if (may_break && below(100) == 0 && attached) {
            severed = true;
            pc_engine_forget(&ranks[rank].engine, !rank, 6);
            counts[FORGOTTEN]++;
        }
        break;
    default:
        progress(rank);
    }
}

static void world(void) {
    num_messages = num_receives = 0;
    attached = severed = false;
    num_lanes = (int)(1 + below(3));
    check(pipe2(pipes, O_NONBLOCK | O_CLOEXEC) == 0, "no pipe", 0);
    for (int number = 0; number < RANKS; number++) {
        struct rank *rank = &ranks[number];
        *rank = (struct rank){.engine = {.size = RANKS, .links = rank->links, .finished = finished, .lost = lost,
                                         .owner = rank},
                              .link = {.tcp = {.rank = number, .size = RANKS, .num_lanes = num_lanes,
                                               .limits = {100, 4000, 1500, 16}},
                                       .wanted = wanted, .watched = watched, .owner = rank}};
        rank->links[0] = rank->links[1] = &rank->link.link;
        check(pc_engine_open(&rank->engine) == 0 && pc_link_tcp_open(&rank->link, &rank->engine) == 0, "no memory", 0);
        check(number > 0 || pc_tcp_watch(&rank->link.tcp, pipes[0]) == 0, "it is not watched", 0);
        open_context(number, 0);
    }
    bool may_break = seed % 3 == 0;
    for (int turn = 0; turn < STEPS; turn++)
        step(may_break);
    attach();
    for (int rank = 0; rank < RANKS; rank++)
        open_context(rank, 1);
    bool all = false;
    for (int turn = 0; !severed && !all && turn < 20000; turn++) {
        all = true;
        for (uint32_t number = 0; number < num_messages; number++)
            all = all && (messages[number].cancelled || messages[number].came) && messages[number].memory == NULL;
        progress(turn % RANKS);
        if (turn % 8 == 0)
            post(turn / 8 % RANKS, turn / 16 % IDENTS);
    }
    for (uint32_t number = 0; !severed && number < num_messages; number++)
        check(messages[number].memory == NULL && (messages[number].cancelled || messages[number].came),
              "a message does not come, or its send does not end", number);
    if (!severed) {
        pc_tcp_say_goodbye(&ranks[0].link.tcp);
        for (int turn = 0; turn < 1000 && !ranks[1].finished; turn++) {
            pc_tcp_flush(&ranks[0].link.tcp);
            progress(1);
        }
        check(ranks[1].finished, "a goodbye is not told", 0);
    }
    severed = true;
    for (int number = 0; number < RANKS; number++) {
        for (int ident = 0; ident < IDENTS; ident++)
            if (ranks[number].contexts[ident] != NULL)
                pc_context_close(ranks[number].contexts[ident]);
        pc_engine_forget(&ranks[number].engine, !number, 5);
        check(ranks[number].engine.num_messages == 0, "a message is left", ranks[number].engine.num_messages);
        pc_link_tcp_free(&ranks[number].link);
        pc_engine_free(&ranks[number].engine);
    }
    for (uint32_t number = 0; number < num_messages; number++)
        check(messages[number].memory == NULL, "a send has no end", number);
    for (uint32_t number = 0; number < num_receives; number++)
        check(receives[number].memory == NULL, "a receive has no end", number);
    close(pipes[0]);
    close(pipes[1]);
}

int main(int count, char **arguments) {
    uint64_t worlds = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    for (uint64_t end = seed + worlds; seed < end; seed++) {
        random_state = seed * 77 + 5;
        world();
    }
    for (int what = 0; what < COUNTS; what++)
        printf("%s%s %llu", what > 0 ? ", " : "", names[what], (unsigned long long)counts[what]);
    printf("\n");
    return 0;
}
