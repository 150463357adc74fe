/* Random calls of ranks that are joined by links over TCP (transports/_core/tcp/tcp.h): all in one
   thread, so that a seed always does the same.

   A world has a few ranks, and connections that are attached in any order, some after messages wait
   for them. Ranks send, push, offer, accept, place, redirect, give up, drop, stop and take back;
   what they are told is queued and handled after the call, as Python does it. Some worlds lose a
   connection in the middle, some say goodbye in the middle, the others end when all is quiet.
   Checked are every byte, the order of messages, that memory which was given back is not touched
   any more (it is filled with other bytes, and freed), and that credits and tables are as at the
   beginning when all is quiet.

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "tcp_calls.h"

/* --- what a rank is told ---------------------------------------------------------------------- */

static struct message *find(int rank, enum what what, int peer, uint64_t number) {
    for (uint64_t index = 0; index < num_messages; index++) {
        struct message *message = &messages[index];
        bool mine = what == SENT
                        ? message->source == rank && message->id == number && !message->taken_back
                    : what == RECEIVED
                        ? message->dest == rank && message->handle == number && message->accepted
                        : message->dest == rank && message->source == peer && !message->is_pushed &&
                              message->arrived && message->offer == number;
        if (mine)
            return message;
    }
    return NULL;
}

static struct message *meet(int rank, const struct event *event) {
    struct message *message = &messages[event->header];
    check(message->dest == rank && message->source == event->peer, "a message has come to another",
          event->header);
    check(!message->arrived && message->nbytes == event->nbytes, "this is not the message",
          event->header);
    check(!ranks[rank].byes[event->peer], "a message comes after a goodbye", event->header);
    uint64_t *next = &ranks[rank].next_from[event->peer];
    check(event->header >= *next, "messages come out of order", event->header);
    for (uint64_t index = *next; index < event->header; index++)
        check(messages[index].source != event->peer || messages[index].dest != rank ||
                  (messages[index].taken_back && messages[index].is_pushed),
              "a message is missing", index);
    *next = event->header + 1;
    message->arrived = true;
    return message;
}

/* All that had been sent by one that has said goodbye must have come. */
static void check_goodbye(int rank, int peer) {
    for (uint64_t number = 0; number < num_messages; number++) {
        struct message *message = &messages[number];
        if (message->source != peer || message->dest != rank || !message->sent)
            continue;
        check(message->arrived, "a message was not there before the goodbye", number);
        if (is_coming(message) && !message->taken_back && message->place->released == false &&
            pc_table_get(&ranks[rank].tcp.receives, message->handle) != NULL)
            fail("a payload that was sent was not there before the goodbye", number);
    }
}

static void handle(int number, struct event *event) {
    struct rank *rank = &ranks[number];
    struct message *message;
    switch (event->what) {
    case ARRIVED:
        message = meet(number, event);
        message->complete = true;
        for (size_t offset = 0; offset < event->nbytes; offset++)
            check(event->payload[offset] == byte_of(event->header, offset), "a payload is wrong",
                  event->header);
        pc_tcp_consumed(&rank->tcp, event->peer, event->nbytes);
        counts[EAGER]++;
        break;
    case PUSHED_TO:
        message = meet(number, event);
        message->is_pushed = true;
        message->handle = event->number;
        counts[PUSHED]++;
        if (below(3))
            (below(4) ? accept_one : drop_one)(message);
        break;
    case OFFERED_TO:
        message = meet(number, event);
        message->offer = event->number;
        counts[OFFERED]++;
        if (below(2))
            (below(4) ? accept_one : drop_one)(message);
        break;
    case SENT:
        message = find(number, SENT, 0, event->number);
        if (message == NULL)
            break; /* it was taken back meanwhile */
        check(!message->sent && message->released, "a send ends twice, or keeps its memory",
              event->number);
        message->sent = true;
        break;
    case RECEIVED:
        message = find(number, RECEIVED, 0, event->number);
        if (message != NULL && !message->given_up && !message->failed && !message->withdrawn)
            finish(message);
        break;
    case CANCELLED:
        message = find(number, CANCELLED, event->peer, event->number);
        if (message == NULL || message->complete || message->given_up || message->failed ||
            message->withdrawn)
            break;
        message->withdrawn = true;
        counts[WITHDRAWN]++;
        if (message->accepted) {
            pc_tcp_give_up(&rank->tcp, message->handle);
            close_place(message);
        }
        break;
    case BYE:
        check(!rank->byes[event->peer] && !rank->lost[event->peer],
              "a goodbye comes twice, or too late", 0);
        rank->byes[event->peer] = true;
        check(ranks[event->peer].closed, "a goodbye that nobody has said", (uint64_t)event->peer);
        check_goodbye(number, event->peer);
        counts[BYES]++;
        break;
    case GONE:
        check(!rank->lost[event->peer] && !rank->forgotten[event->peer], "a link is lost twice",
              (uint64_t)event->peer);
        rank->lost[event->peer] = true;
        counts[LOST]++;
        break;
    }
}

static bool handle_all(int number) {
    struct rank *rank = &ranks[number];
    bool worked = rank->first != NULL;
    while (rank->first != NULL) {
        struct event *event = rank->first;
        rank->first = event->next;
        if (rank->first == NULL)
            rank->last = &rank->first;
        if (!rank->closed)
            handle(number, event);
        free(event);
    }
    return worked;
}

static bool go_on(int number) {
    bool worked = !ranks[number].closed && pc_tcp_progress(&ranks[number].tcp);
    return handle_all(number) || worked;
}

static void forget(int number, int peer) {
    struct rank *rank = &ranks[number];
    handle_all(number);
    pc_tcp_forget(&rank->tcp, peer);
    rank->forgotten[peer] = true;
    for (uint64_t index = 0; index < num_messages; index++) {
        struct message *message = &messages[index];
        if (message->source == number && message->dest == peer && !message->sent) {
            check(message->released, "a send to one that is forgotten keeps its memory", index);
            message->sent = true;
        }
        if (message->dest == number && message->source == peer && is_coming(message)) {
            message->failed = true;
            close_place(message);
        }
    }
}

/* --- worlds ----------------------------------------------------------------------------------- */

static void attach(int a, int b, int lane) {
    for (int side = 0; side < 2; side++) {
        int from = side ? b : a, to = side ? a : b;
        if (waiting[from][to][lane] < 0)
            continue;
        int fd = waiting[from][to][lane];
        waiting[from][to][lane] = -1;
        if (pc_tcp_attach(&ranks[from].tcp, to, lane, fd) != 0)
            close(fd);
    }
}

static void attach_all(void) {
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++)
            for (int lane = 0; lane < num_lanes; lane++)
                attach(a, b, lane);
}

static void open_world(void) {
    num_messages = num_owners = 0;
    num_lanes = (int)(1 + below(4));
    for (int number = 0; number < RANKS; number++) {
        struct rank *rank = &ranks[number];
        *rank = (struct rank){.tcp = {.rank = number,
                                      .size = RANKS,
                                      .num_lanes = num_lanes,
                                      .limits = limits,
                                      .up = &up,
                                      .owner = rank}};
        rank->last = &rank->first;
        check(pc_tcp_open(&rank->tcp) == 0, "it cannot be opened", (uint64_t)number);
    }
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++)
            for (int lane = 0; lane < num_lanes; lane++) {
                int fds[2];
                check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0,
                      "no sockets", 0);
                int room = 4 << below(4) << 10;
                for (int side = 0; side < 2; side++)
                    setsockopt(fds[side], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
                waiting[a][b][lane] = fds[0];
                waiting[b][a][lane] = fds[1];
                if (below(2) && (lane == 0 || below(2)))
                    attach(a, b, lane);
            }
}

static void step(void) {
    int number = (int)below(RANKS);
    switch (below(16)) {
    case 0: case 1: case 2: case 3:
        send_one(number);
        break;
    case 4: case 5: case 6: case 7:
        if (!ranks[number].closed)
            go_on(number);
        break;
    case 8: case 9:
        if (num_messages > 0)
            accept_one(any_message());
        break;
    case 10:
        if (num_messages > 0)
            redirect_one(any_message());
        break;
    case 11:
        if (num_messages > 0 && below(2))
            drop_one(any_message());
        break;
    case 12:
        if (num_messages > 0 && below(2))
            give_up_one(any_message());
        break;
    case 13:
        if (below(2))
            take_back_one();
        break;
    default: {
        int peer = (number + 1 + (int)below(RANKS - 1)) % RANKS;
        attach(number, peer, (int)below((uint64_t)num_lanes));
    }
    }
    /* What a call has told is handled before the next one: what has ended must not be used any
       more. */
    for (int rank = 0; rank < RANKS; rank++)
        handle_all(rank);
}

/* Go on until nothing happens any more; sockets of one host hand over at once. */
static void settle(void) {
    for (int quiet = 0; quiet < 3;) {
        bool worked = false;
        for (int number = 0; number < RANKS; number++)
            worked = (!ranks[number].closed && go_on(number)) || worked;
        quiet = worked ? 0 : quiet + 1;
    }
}

static void check_quiet(void) {
    for (uint64_t number = 0; number < num_messages; number++) {
        struct message *message = &messages[number];
        accept_one(message);
        settle();
    }
    settle();
    for (uint64_t number = 0; number < num_messages; number++) {
        struct message *message = &messages[number];
        check(message->sent || message->taken_back, "a send has no end", number);
        check(message->arrived || message->taken_back, "a message has not come", number);
        check(!is_coming(message), "a receive has no end", number);
    }
    for (int number = 0; number < RANKS; number++) {
        struct pc_tcp *tcp = &ranks[number].tcp;
        check(tcp->sends.used == 0 && tcp->receives.used == 0, "something is left in a table",
              (uint64_t)number);
        check(tcp->behind == 0 && tcp->restless == 0, "something is left to do", (uint64_t)number);
        for (int other = 0; other < RANKS; other++) {
            struct pc_tcp_peer *peer = &tcp->peers[other],
                               *theirs = &ranks[other].tcp.peers[number];
            check(peer->held[0] == 0 && peer->held[1] == 0, "bytes count as held", (uint64_t)other);
            check(peer->owed[0] == theirs->unrepaid, "credit is lost", peer->owed[0]);
            check(peer->owed[1] == 0, "credit for what is pushed is lost", peer->owed[1]);
        }
    }
}

/* One says goodbye, with whatever is under way, while the others read late. */
static void leave_world(int number) {
    handle_all(number);
    struct rank *rank = &ranks[number];
    rank->closed = true;
    pc_tcp_say_goodbye(&rank->tcp);
    for (int turn = 0; !pc_tcp_flush(&rank->tcp); turn++) {
        check(turn < 200000, "a goodbye is never written", (uint64_t)number);
        int other = (number + 1 + (int)below(RANKS - 1)) % RANKS;
        if (!ranks[other].closed && below(4) == 0)
            go_on(other);
        if (below(8) == 0) {
            attach_all();
            handle_all(other);
        }
    }
    pc_tcp_close(&rank->tcp);
    handle_all(number);
    settle();
    for (int other = 0; other < RANKS; other++)
        if (other != number && !ranks[other].closed && ranks[number].tcp.peers[other].used)
            check(ranks[other].byes[number] || ranks[other].lost[number] ||
                      ranks[other].forgotten[number] || ranks[number].forgotten[other] ||
                      ranks[number].lost[other],
                  "a goodbye has not come", (uint64_t)other);
}

static void lose_one(void) {
    int number = (int)below(RANKS), peer = (number + 1 + (int)below(RANKS - 1)) % RANKS;
    struct pc_tcp_lane *lanes = ranks[number].tcp.peers[peer].lanes;
    int lane = (int)below((uint64_t)num_lanes);
    if (lanes == NULL || lanes[lane].fd < 0)
        return;
    int ways[] = {SHUT_RD, SHUT_WR, SHUT_RDWR};
    shutdown(lanes[lane].fd, ways[below(3)]);
    for (uint64_t more = below(60); more > 0; more--)
        step();
    settle();
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < RANKS; b++)
            if (ranks[a].lost[b] && !ranks[a].forgotten[b] && below(4))
                forget(a, b);
}

static void close_world(void) {
    for (int number = 0; number < RANKS; number++) {
        ranks[number].closed = true;
        handle_all(number);
        pc_tcp_free(&ranks[number].tcp);
        handle_all(number);
        for (int other = 0; other < RANKS; other++)
            for (int lane = 0; lane < num_lanes; lane++)
                if (waiting[number][other][lane] >= 0) {
                    close(waiting[number][other][lane]);
                    waiting[number][other][lane] = -1;
                }
    }
    check(num_owners == 0, "memory is not given back", num_owners);
    for (uint64_t number = 0; number < num_messages; number++) {
        close_place(&messages[number]);
        check(messages[number].released, "the memory of a send is not given back", number);
    }
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: tcp_random WORLDS SEED\n");
        return 2;
    }
    uint64_t worlds = strtoull(arguments[1], NULL, 10), first = strtoull(arguments[2], NULL, 10);
    memset(waiting, 255, sizeof waiting);
    for (seed = first; seed < first + worlds; seed++) {
        random_state = seed * 0x9E3779B97F4A7C15u + 1;
        below(2);
        open_world();
        uint64_t fate = below(4), steps = 20 + below(800);
        for (uint64_t done = 0; done < steps; done++)
            step();
        if (fate == 0)
            lose_one();
        if (fate >= 2) {
            attach_all();
            settle();
            check_quiet();
        }
        if (fate > 0 && below(4))
            for (int number = 0; number < RANKS; number++)
                leave_world((number + (int)seed % RANKS) % RANKS);
        close_world();
    }
    for (int grave = 0; grave < GRAVES; grave++)
        bury(malloc(1), 1);
    printf("messages %llu, buffered %llu, pushed %llu, offered %llu, complete %llu, given up %llu, "
           "redirected %llu, "
           "taken back %llu, withdrawn %llu, lost %llu, goodbyes %llu\n",
           (unsigned long long)counts[ALL], (unsigned long long)counts[EAGER],
           (unsigned long long)counts[PUSHED], (unsigned long long)counts[OFFERED],
           (unsigned long long)counts[COMPLETE], (unsigned long long)counts[GIVEN_UP],
           (unsigned long long)counts[REDIRECTED], (unsigned long long)counts[TAKEN_BACK],
           (unsigned long long)counts[WITHDRAWN], (unsigned long long)counts[LOST],
           (unsigned long long)counts[BYES]);
    return 0;
}
