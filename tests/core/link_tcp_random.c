/* Random calls of engines that are joined by the link over sockets
   (transports/_core/engine/link_tcp), in one thread.

   Messages of all sizes go all ways; sends are taken back, receives given up at any moment (memory
   is freed at once: AddressSanitizer sees who touches it), contexts are opened late and broken,
   peers forgotten. Some receives ask, and take what they hold, drop it, or start again in their
   place when it was taken back. Every byte is checked, that what waits stands in the order in which
   it was sent, that who asks has the first, and was the first to ask, and that what was sent comes
   once, and, if nothing was broken, all of it; then one rank says goodbye.

   link_tcp_random WORLDS SEED */
#include "engine/engine.h"
#include "engine/link_tcp.h"
#include "random_worlds.h"

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

enum count {
    RECEIVED, BUFFERED, UNDER_WAY, CANCELLED, GIVEN_UP, PARKED, WANTED, WATCHED, BROKEN, FORGOTTEN,
    FINISHED, FROM_CALLBACKS, HELD, TAKEN_BACK, STARTED_AGAIN, DROPPED, COUNTS
};
static const char *const names[] = {
    "received", "buffered", "under way", "cancelled", "given up", "parked", "wanted", "watched",
    "broken", "forgotten", "finished", "from callbacks", "held", "taken back", "started again",
    "dropped"
};
static uint64_t counts[COUNTS];

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
    bool cancelled, came, dropped;
};
struct receive {
    struct pc_receive receive;
    int rank, ident;
    unsigned char *memory;
    uint64_t order;
    uint32_t had; /* the message that it held last */
};

static struct rank ranks[RANKS];
static struct message messages[MOST];
static struct receive receives[4 * MOST];
static uint32_t num_messages, num_receives;
static uint64_t order; /* of the last receive that is not started again */
static int num_lanes, pipes[2];
static bool attached, severed;
static bool quiet; /* nothing new is begun */
static bool plain; /* receives do not ask */

static unsigned char byte_of(uint32_t number, size_t offset) {
    return (unsigned char)(number * 131 + offset * 7 + offset / 251);
}

static void over(struct message *message) {
    free(message->memory);
    message->memory = NULL;
}

static void ended(struct pc_send *send) { over(send->owner); }

/* A receive has just been given a message: none that waits was before, and no receive that
   waits. */
static void check_held(const struct receive *mine) {
    const struct message *message = &messages[mine->had];
    const struct pc_matching *matching = &mine->receive.context->matching;
    check(mine->had < num_messages && message->source != mine->rank &&
              message->ident == mine->ident && !message->came && !message->dropped,
          "a message is held that should not", mine->had);
    const struct pc_unexpected *waits = pc_match_first_message(matching);
    for (; waits != NULL; waits = pc_match_next_message(waits))
        check(waits->queued.tag > (int64_t)mine->had,
              "a receive takes a message before an older one", mine->had);
    const struct pc_posted *posted = pc_match_first_posted(matching);
    for (; posted != NULL; posted = pc_match_next_posted(posted))
        check(((const struct receive *)((const struct pc_receive *)posted)->owner)->order >
                  mine->order,
              "a message goes past a receive that was before", mine->had);
}

static void check_came(const struct receive *mine) {
    const struct pc_receive *receive = &mine->receive;
    uint32_t number = (uint32_t)receive->tag;
    struct message *message = &messages[number];
    check(number < num_messages && !message->came, "a message comes twice", number);
    check(receive->source == message->source && receive->nbytes == message->nbytes &&
              mine->ident == message->ident && (!receive->ask || number == mine->had),
          "it is another one", number);
    check(!message->cancelled && !message->dropped, "a message comes that nobody sends or wants",
          number);
    for (size_t offset = 0; offset < receive->nbytes; offset++)
        check(mine->memory[offset] == byte_of(number, offset), "a byte is wrong", number);
    message->came = true;
    counts[RECEIVED]++;
}

static void post(int rank, int ident, const struct receive *old);
static void go_on(struct receive *mine);

static void told(struct pc_receive *receive) {
    struct receive *mine = receive->owner;
    check(mine->memory != NULL, "a receive ends twice", num_receives);
    if (receive->state == PC_RECEIVE_HELD) {
        counts[HELD]++;
        mine->had = (uint32_t)receive->message->match.queued.tag;
        check_held(mine);
        if (quiet || below(4) == 0) {
            counts[FROM_CALLBACKS]++;
            go_on(mine);
        }
        return;
    }
    if (receive->status == 0) {
        check_came(mine);
    } else if (receive->status == PC_TAKEN_BACK) {
        const struct message *message = &messages[mine->had];
        check(receive->ask, "a receive that does not ask waits no more", mine->had);
        check(message->cancelled || message->send.status != 0, "nobody has taken back a message",
              mine->had);
        counts[TAKEN_BACK]++;
    } else {
        check(severed || ranks[mine->rank].finished, "a receive fails",
              (uint64_t)llabs(receive->status));
    }
    free(mine->memory);
    mine->memory = NULL;
    if (receive->status == PC_TAKEN_BACK && below(4) > 0)
        post(mine->rank, mine->ident, mine);
}

/* Start a receive; or one that asks again where it was, as its message was taken back. */
static void post(int rank, int ident, const struct receive *old) {
    if (ranks[rank].contexts[ident] == NULL || num_receives == 4 * MOST)
        return;
    struct receive *mine = &receives[num_receives++];
    *mine = (struct receive){.rank = rank, .ident = ident, .memory = malloc(LARGEST)};
    mine->receive =
        (struct pc_receive){.into = mine->memory, .room = LARGEST, .notify = told, .owner = mine};
    mine->receive.posted.queued.source = mine->receive.posted.queued.tag = PC_ANY;
    mine->receive.ask = old != NULL || (!plain && below(3) == 0);
    mine->order = old != NULL ? old->order : ++order;
    counts[STARTED_AGAIN] += old != NULL;
    if (old != NULL)
        pc_receive_start_at(ranks[rank].contexts[ident], &mine->receive,
                            old->receive.posted.queued.number);
    else
        pc_receive_start(ranks[rank].contexts[ident], &mine->receive);
}

/* Have the message of a receive that holds one written, or drop it. */
static void go_on(struct receive *mine) {
    if (quiet || below(4) > 0) {
        check(pc_receive_into(&mine->receive, mine->memory) == 0 &&
                  mine->receive.state != PC_RECEIVE_HELD,
              "a held message is not written", mine->had);
        return;
    }
    messages[mine->had].dropped = true;
    pc_receive_drop(&mine->receive);
    free(mine->memory);
    mine->memory = NULL;
    counts[DROPPED]++;
}

/* What waits stands in the order in which it was sent, and no receive waits for it. */
static void check_order(int rank) {
    for (int ident = 0; ident < IDENTS; ident++) {
        const struct pc_context *context = ranks[rank].contexts[ident];
        const struct pc_unexpected *waits =
            context != NULL ? pc_match_first_message(&context->matching) : NULL;
        check(waits == NULL || pc_match_first_posted(&context->matching) == NULL,
              "a message and its receive both wait", (uint64_t)ident);
        for (int64_t last = -1; waits != NULL;
             last = waits->queued.tag, waits = pc_match_next_message(waits))
            check(waits->queued.tag > last, "a message comes before an earlier one",
                  (uint64_t)last);
    }
}

static void send_of(int source, int ident, size_t nbytes) {
    if (ranks[source].contexts[ident] == NULL || num_messages == MOST)
        return;
    uint32_t number = num_messages++;
    struct message *message = &messages[number];
    size_t first = below(nbytes + 1);
    *message = (struct message){
        .source = source, .ident = ident, .nbytes = nbytes, .memory = malloc(nbytes + 1)};
    for (size_t offset = 0; offset < nbytes; offset++)
        message->memory[offset] = byte_of(number, offset);
    message->parts[0] = (struct iovec){message->memory, first};
    message->parts[1] = (struct iovec){message->memory + first, nbytes - first};
    message->send = (struct pc_send){
        .peer = !source, .parts = message->parts, .num_parts = 2, .ended = ended, .owner = message};
    unsigned char header[PC_P2P_NBYTES];
    pc_p2p_header(header, (uint64_t)ident + 5, number, 0);
    if (pc_send_start(ranks[source].contexts[ident], &message->send, header, sizeof header,
                      below(3)) == PC_SENT) {
        check(message->send.status == 0 || severed, "a send fails", number);
        over(message);
        counts[BUFFERED]++;
    } else {
        counts[UNDER_WAY]++;
    }
}

static void send_one(int source) {
    size_t most[] = {90, 900, LARGEST};
    send_of(source, (int)below(IDENTS), below(most[below(3)] + 1));
}

static void attach(void) {
    for (int lane = 0; !attached && lane < num_lanes; lane++) {
        int fds[2], room = 4096;
        check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0,
              "no sockets", 0);
        for (int side = 0; side < 2; side++) {
            setsockopt(fds[side], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
            check(pc_tcp_attach(&ranks[side].link.tcp, !side, lane, fds[side]) == 0,
                  "it is not attached", 0);
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
        ranks[rank].contexts[ident] =
            pc_context_open(&ranks[rank].engine, (uint64_t)ident + 5, members, RANKS, rank);
}

/* Two exchange long messages. Rank 1 offers its own and accepts that of rank 0, which learns of
   both at once: what rank 0 writes first is that it accepts, too. Behind its payload that would be
   late where the network is slow. */
static void exchange(void) {
    struct pc_tcp_frame frame;
    plain = true;
    attach();
    send_of(0, 0, LARGEST);
    progress(1);
    send_of(1, 0, LARGEST);
    post(1, 0, NULL);
    post(0, 0, NULL);
    progress(0);
    check(recv(ranks[1].link.tcp.peers[0].lanes[0].fd, &frame, sizeof frame, MSG_PEEK) ==
                  sizeof frame && frame.kind == PC_TCP_GO,
          "a payload is written before an answer", frame.kind);
    plain = false;
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
        post(rank, (int)below(IDENTS), NULL);
        break;
    case 5:
        if (mine == NULL || mine->memory == NULL)
            break;
        if (mine->receive.state == PC_RECEIVE_HELD && below(4) > 0) {
            go_on(mine);
            break;
        }
        counts[PARKED] += mine->receive.state == PC_RECEIVE_READING;
        if (pc_receive_give_up(&mine->receive)) {
            counts[GIVEN_UP]++;
            free(mine->memory);
            mine->memory = NULL;
        }
        break;
    case 6:
        if (message != NULL && message->memory != NULL && pc_send_stop(&message->send) &&
            pc_send_take_back(&message->send)) {
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
        if (may_break && below(50) == 0 && attached) {
            severed = true;
            pc_engine_forget(&ranks[rank].engine, !rank, 6);
            counts[FORGOTTEN]++;
        }
        break;
    default:
        progress(rank);
    }
    check_order(rank);
}

static bool is_over(const struct message *message) {
    return (message->cancelled || message->came || message->dropped) && message->memory == NULL;
}

static void world(void) {
    num_messages = num_receives = 0;
    order = 0;
    attached = severed = quiet = false;
    num_lanes = (int)(1 + below(3));
    check(pipe2(pipes, O_NONBLOCK | O_CLOEXEC) == 0, "no pipe", 0);
    for (int number = 0; number < RANKS; number++) {
        struct rank *rank = &ranks[number];
        *rank = (struct rank){.engine = {.size = RANKS,
                                         .links = rank->links,
                                         .finished = finished,
                                         .lost = lost,
                                         .owner = rank},
                              .link = {.tcp = {.rank = number,
                                               .size = RANKS,
                                               .num_lanes = num_lanes,
                                               .limits = {100, 4000, 1500, 16}},
                                       .wanted = wanted,
                                       .watched = watched,
                                       .owner = rank}};
        rank->links[0] = rank->links[1] = &rank->link.link;
        check(pc_engine_open(&rank->engine) == 0 &&
                  pc_link_tcp_open(&rank->link, &rank->engine) == 0,
              "no memory", 0);
        check(number > 0 || pc_tcp_watch(&rank->link.tcp, pipes[0]) == 0, "it is not watched", 0);
        open_context(number, 0);
    }
    if (seed % 4 == 1)
        exchange();
    bool may_break = seed % 3 == 0;
    for (int turn = 0; turn < STEPS; turn++)
        step(may_break);
    attach();
    for (int rank = 0; rank < RANKS; rank++)
        open_context(rank, 1);
    quiet = true;
    for (uint32_t number = 0; number < num_receives; number++)
        if (receives[number].memory != NULL && receives[number].receive.state == PC_RECEIVE_HELD)
            go_on(&receives[number]);
    bool all = false;
    for (int turn = 0; !severed && !all && turn < 20000; turn++) {
        all = true;
        for (uint32_t number = 0; number < num_messages; number++)
            all = all && is_over(&messages[number]);
        progress(turn % RANKS);
        if (turn % 8 == 0)
            post(turn / 8 % RANKS, turn / 16 % IDENTS, NULL);
    }
    for (uint32_t number = 0; !severed && number < num_messages; number++)
        check(is_over(&messages[number]), "a message does not come, or its send does not end",
              number);
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
        check(ranks[number].engine.num_messages == 0, "a message is left",
              ranks[number].engine.num_messages);
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
    run_worlds(world, worlds, count > 2 ? strtoull(arguments[2], NULL, 10) : 1);
    print_counts(names, counts, COUNTS);
    return 0;
}
