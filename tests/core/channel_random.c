/* Random calls of ranks that are joined by channels (transports/_core/channel), over the memory
   of one host (host.h): all in one thread, so that a seed always does the same.

       channel_random WORLDS SEED

   Ranks send, offer, accept, redirect, give up, drop, stop and take back; what they are told is
   queued and handled later, as Python does it. In some worlds the kernel may not copy; in some a
   rank ends in the middle and is forgotten. Checked are every byte, the order of messages, that
   memory is released once and not touched afterwards (it is filled with other bytes, and freed),
   and that credits, blocks, transfers and tables are as at the beginning when all is quiet.

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "channel_messages.h"

/* --- calls ------------------------------------------------------------------------------------ */

static size_t some_nbytes(void) {
    static const size_t most[] = {1, 200, 3000, 30000, 120000, 300000};
    return below(most[below(6)] + 1);
}

static void start_send(int source, int dest) {
    pc_channel *channel = &ranks[source].channel;
    uint64_t number = num_messages++;
    struct message *message = &messages[number];
    unsigned char header[6000];
    size_t header_nbytes = sizeof number + (below(10) == 0 ? below(5900) : below(50)),
           num_parts = 1 + below(4);
    *message = (struct message){.source = source, .dest = dest, .nbytes = some_nbytes()};
    /* An empty one without a transfer is the receiver's as soon as it accepts it, which its sender
       cannot know. */
    message->nbytes += message->nbytes == 0 && !channel->single_copy;
    memcpy(header, &number, sizeof number);
    for (size_t offset = sizeof number; offset < header_nbytes; offset++)
        header[offset] = byte_of(number, offset);
    struct pc_channel_send *send = calloc(1, sizeof *send);
    struct place *place = place_of(message->nbytes + num_parts * GAP);
    send->table = malloc(num_parts * sizeof *send->table);
    unsigned char *memory = place->memory;
    for (size_t part = 0, at = 0; part < num_parts; part++) {
        size_t nbytes =
            part + 1 < num_parts ? below(message->nbytes - at + 1) : message->nbytes - at;
        for (size_t offset = 0; offset < nbytes; offset++)
            memory[offset] = byte_of(number, at + offset);
        if (nbytes > 0)
            send->table[send->parts.num_parts++] = (struct iovec){memory, nbytes};
        at += nbytes;
        memory += nbytes + GAP;
    }
    send->parts.parts = send->table;
    send->nbytes = message->nbytes;
    send->peer = dest;
    send->owner = place;
    counts[ALL]++;
    if (below(4) > 0 &&
        pc_channel_post(channel, dest, header, header_nbytes, send->parts, send->nbytes,
                        send->parts.num_parts == 1)) {
        pc_channel_send_free(channel, send);
        counts[POSTED]++;
        return;
    }
    message->id = pc_channel_offer(channel, send, header, header_nbytes);
    check(message->id != 0, "there is no memory", number);
    counts[OFFERED]++;
}

static void check_bytes(const struct message *message, const unsigned char *memory) {
    uint64_t number = (uint64_t)(message - messages);
    for (size_t offset = 0; offset < message->nbytes; offset++)
        check(memory[offset] == byte_of(number, offset), "a byte is wrong", number);
}

static struct place *room_for(const struct message *message) {
    struct place *place = place_of(message->nbytes + GAP);
    place->received = malloc(place->nbytes);
    return place;
}

static void complete(struct message *message, const unsigned char *memory) {
    check(!message->stopped, "a message comes that was stopped", (uint64_t)(message - messages));
    check_bytes(message, memory);
    message->complete = true;
    message->handle = 0;
    counts[COMPLETE]++;
}
static void complete_at(struct message *message, const struct place *place) {
    complete(message, place->received);
    for (size_t offset = message->nbytes; offset < place->nbytes; offset++)
        check(place->received[offset] == POISON, "a byte is written behind a payload",
              (uint64_t)(message - messages));
}

static void accept_offer(struct rank *rank, struct message *message, const struct pc_offer *offer) {
    struct pc_channel_receive *receive = calloc(1, sizeof *receive);
    struct place *place = room_for(message);
    receive->peer = message->source;
    receive->into = place->memory;
    receive->owner = place;
    receive->handle = pc_table_add(&rank->channel.receives, receive);
    uint64_t handle = receive->handle;
    int status = pc_channel_accept(&rank->channel, receive, offer);
    if (status > 0) {
        message->handle = handle;
        message->place = place;
        return;
    }
    check(status == 0 || status == -1, "an offer cannot be accepted", (uint64_t)-status);
    pc_channel_receive_end(&rank->channel, receive);
    if (status == 0) {
        complete_at(message, place);
    } else {
        check(message->taken_back, "an offer is gone that nobody took back",
              (uint64_t)(message - messages));
        message->withdrawn = true;
        counts[WITHDRAWN]++;
    }
}

static void handle_event(struct rank *rank, struct event *event) {
    pc_channel *channel = &rank->channel;
    struct message *message = NULL;
    switch (event->what) {
    case ARRIVED:
    case ARRIVED_IN_BLOCK:
        message = &messages[event->number];
        check(message->nbytes == event->nbytes, "a payload has another length", event->number);
        complete(message, event->payload);
        if (event->what == ARRIVED)
            pc_channel_use(channel, event->peer, event->nbytes);
        else
            pc_channel_consume(channel, event->peer, event->nbytes, &event->block);
        break;
    case OFFERED_TO:
        message = &messages[event->number];
        check(message->nbytes == event->offer.nbytes, "an offer has another length", event->number);
        if (below(8) > 0) {
            accept_offer(rank, message, &event->offer);
        } else {
            message->given_up = true;
            pc_channel_tell(channel, event->peer, PC_FINISHED, event->offer.id);
        }
        break;
    case SENT:
        message = by_id(channel->rank, event->number);
        check(message != NULL && !message->sent, "what was sent?", event->number);
        check(message->complete || message->there || message->given_up || ranks[message->dest].dead,
              "nobody has what was sent", event->number);
        message->sent = true;
        break;
    case CANCELLED:
        message = by_id(event->peer, event->number);
        check(message != NULL && message->taken_back, "what was cancelled?", event->number);
        if (message->handle == 0) /* else it has been accepted since, and is withdrawn */
            message->withdrawn = true;
        break;
    case RECEIVED:
    case TAKEN_BACK:
        message = by_handle(channel->rank, event->number);
        check(message != NULL, "whose receive was that?", event->number);
        if (event->what == RECEIVED) {
            complete_at(message, message->place);
        } else {
            check(message->taken_back, "a message is withdrawn that nobody took back",
                  event->number);
            message->withdrawn = true;
            message->handle = 0;
            counts[WITHDRAWN]++;
        }
        break;
    case BYE:
        check(!rank->bye[event->peer], "a rank says goodbye twice", (uint64_t)event->peer);
        rank->bye[event->peer] = true;
        break;
    }
}

static bool handle_events(struct rank *rank, uint64_t most) {
    bool any = false;
    for (; most > 0 && rank->first != NULL; most--) {
        struct event *event = rank->first;
        rank->first = event->next;
        if (rank->first == NULL)
            rank->last = &rank->first;
        if (event->peer < 0 || !ranks[event->peer].dead)
            handle_event(rank, event);
        free(event);
        any = true;
    }
    return any;
}

static void stop_or_take_back(struct rank *rank, struct message *message) {
    pc_channel *channel = &rank->channel;
    struct pc_channel_send *send = pc_table_get(&channel->sends, message->id);
    if (send == NULL || message->sent)
        return;
    if (below(2)) {
        message->stopped = pc_channel_send_stop(channel, send);
        check(!message->stopped || !message->there, "a message is stopped that was received",
              message->id);
        if (!message->stopped)
            return;
    }
    message->taken_back = true;
    pc_channel_send_give_up(channel, send);
}

static void redirect_or_give_up(struct rank *rank, struct message *message) {
    pc_channel *channel = &rank->channel;
    struct pc_channel_receive *receive = pc_table_get(&channel->receives, message->handle);
    if (receive == NULL)
        return;
    if (below(3) > 0) {
        struct place *place = room_for(message);
        check(pc_channel_receive_redirect(channel, receive, place->memory, place) == 0,
              "there is no memory", 0);
        message->place = place;
        counts[REDIRECTED]++;
        return;
    }
    message->handle = 0;
    message->given_up = true;
    counts[GIVEN_UP]++;
    pc_channel_receive_give_up(channel, receive);
}

static void end_rank(int who) {
    ranks[who].dead = true;
    counts[FORGOTTEN]++;
    for (int rank = 0; rank < RANKS; rank++)
        if (!ranks[rank].dead)
            pc_channel_forget(&ranks[rank].channel, who);
}

static void act(int who, bool may_end) {
    struct rank *rank = &ranks[who];
    uint64_t recent = below(num_messages < 12 ? num_messages + 1 : 12);
    struct message *message = recent < num_messages ? &messages[num_messages - 1 - recent] : NULL;
    int dest = (who + 1 + (int)below(RANKS - 1)) % RANKS;
    switch (below(10)) {
    case 0:
    case 1:
    case 2:
        if (num_messages < MOST_MESSAGES && !ranks[dest].dead)
            start_send(who, dest);
        break;
    case 3:
        if (message != NULL && message->source == who && message->id != 0)
            stop_or_take_back(rank, message);
        break;
    case 4:
        if (message != NULL && message->dest == who && message->handle != 0)
            redirect_or_give_up(rank, message);
        break;
    case 5:
        if (may_end && below(60) == 0)
            end_rank(who);
        break;
    case 6:
    case 7:
        handle_events(rank, 1 + below(4));
        break;
    default: {
        bool ready = pc_channel_ready(&rank->channel);
        int worked = pc_channel_progress(&rank->channel);
        check(worked >= 0, "there is no memory", 0);
        /* A sender that is new and has written nothing yet is seen, and that is all; but only
           once. */
        check(worked > 0 || !ready || !pc_channel_ready(&rank->channel),
              "it is ready, and does nothing", 0);
    }
    }
}

/* --- a world ---------------------------------------------------------------------------------- */

static bool turn(void) {
    bool any = false;
    for (int who = 0; who < RANKS; who++) {
        if (ranks[who].dead)
            continue;
        any |= pc_channel_progress(&ranks[who].channel) > 0;
        any |= handle_events(&ranks[who], UINT64_MAX);
    }
    return any;
}

static void check_quiet(void) {
    for (int who = 0; who < RANKS; who++) {
        pc_channel *channel = &ranks[who].channel;
        if (ranks[who].dead)
            continue;
        check(channel->sends.used == 0 && channel->receives.used == 0,
              "something is still under way", (uint64_t)who);
        check(channel->helping.count == 0 && channel->receiving.count == 0 &&
                  channel->num_asked == 0 && channel->receives_by_id.used == 0,
              "a list is not empty", (uint64_t)who);
        check(channel->backlogged == 0 && !pc_channel_ready(channel), "something is left to do",
              (uint64_t)who);
        for (int other = 0; other < RANKS; other++)
            if (other != who && !ranks[other].dead)
                check(channel->peers[other].charged == ranks[other].channel.peers[who].used,
                      "credit is gone", (uint64_t)other);
        for (uint32_t unit = pc_room_begin[0]; unit < PC_UNITS; unit++)
            check(channel->heap.length[unit] == 0 ||
                      pc_load(pc_heap_state(channel->heap.base, unit)) == 0,
                  "a block is never given back", unit);
        check(counts[FORGOTTEN] > 0 || channel->num_free_transfers == PC_TRANSFERS,
              "a transfer is gone", (uint64_t)who);
    }
    for (uint64_t number = 0; number < num_messages; number++) {
        struct message *message = &messages[number];
        if (!ranks[message->source].dead && !ranks[message->dest].dead)
            check(message->complete || message->given_up || message->withdrawn, "a message is lost",
                  number);
    }
}

/* The table of communicators: all ranks find the same region, and nobody waits for a lock for
   ever. */
static void check_regions(void) {
    size_t nbytes = pc_region_nbytes(RANKS);
    unsigned char *regions[RANKS];
    int entries[RANKS];
    pc_flag32 *lock = &pc_host_page(&ranks[0].host)->lock;
    atomic_store(lock, 2);
    check(pc_host_attach(&ranks[0].host, 77, nbytes, &entries[0], &regions[0]) == EBUSY,
          "the lock is no lock", 0);
    atomic_store(lock, 0);
    for (int who = 0; who < RANKS; who++)
        check(pc_host_attach(&ranks[who].host, 77, nbytes, &entries[who], &regions[who]) == 0,
              "it has no region", 0);
    regions[0][nbytes - 1] = 5;
    check(entries[0] == entries[2] && regions[2][nbytes - 1] == 5, "there are two regions", 0);
    for (int who = 0; who < RANKS; who++)
        pc_host_detach(&ranks[who].host, entries[who], RANKS, regions[who], nbytes);
}

static void run_world(void) {
    num_messages = 0;
    uint64_t forgotten = counts[FORGOTTEN];
    counts[FORGOTTEN] = 0;
    int fd = memfd_create("world", MFD_CLOEXEC), doorbells[RANKS];
    for (int who = 0; who < RANKS; who++)
        doorbells[who] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    bool single_copy = below(3) > 0, may_end = below(3) == 0;
    memset(ranks, 0, sizeof ranks);
    for (int who = 0; who < RANKS; who++) {
        struct rank *rank = &ranks[who];
        rank->last = &rank->first;
        rank->channel =
            (pc_channel){.host = &rank->host, .up = &up, .owner = rank, .single_copy = single_copy};
        rank->channel.eager_limit = 30000;
        rank->channel.credit = 200000;
        rank->channel.message_cost = 100;
        check(pc_host_open(&rank->host, fd, who, RANKS, doorbells, RANKS) == 0,
              "the memory cannot be mapped", 0);
        check(pc_channel_open(&rank->channel) == 0, "a channel cannot be opened", (uint64_t)who);
    }
    if (below(20) == 0)
        check_regions();
    for (uint64_t calls = 300 + below(1500); calls > 0; calls--) {
        int who = (int)below(RANKS);
        if (!ranks[who].dead)
            act(who, may_end && counts[FORGOTTEN] == 0);
    }
    for (int turns = 0; turn(); turns++)
        check(turns < 10000, "it never ends", 0);
    check_quiet();
    for (int who = 0; who < RANKS; who++)
        for (int other = 0; other < RANKS && !ranks[who].dead; other++)
            if (ranks[who].channel.peers[other].linked)
                pc_channel_tell(&ranks[who].channel, other, PC_BYE, 0);
    while (turn())
        continue;
    for (int who = 0; who < RANKS; who++)
        for (int other = 0; other < RANKS; other++)
            check(ranks[who].dead || ranks[other].dead ||
                      ranks[other].bye[who] == ranks[who].channel.peers[other].linked,
                  "a goodbye is missing", (uint64_t)who);
    for (int who = 0; who < RANKS; who++)
        pc_channel_close(&ranks[who].channel);
    for (int who = 0; who < RANKS; who++) {
        ranks[who].dead = false;
        for (struct event *event = ranks[who].first; event != NULL; event = ranks[who].first) {
            ranks[who].first = event->next;
            free(event);
        }
        pc_channel_free(&ranks[who].channel);
        pc_host_close(&ranks[who].host);
        close(doorbells[who]);
    }
    close(fd);
    free_places();
    counts[FORGOTTEN] += forgotten;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: channel_random WORLDS SEED\n");
        return 2;
    }
    run_worlds(run_world, strtoull(arguments[1], NULL, 10), strtoull(arguments[2], NULL, 10));
    static const char *const names[] = {"messages", "posted",     "in blocks", "offered",
                                        "complete", "redirected", "given up",  "withdrawn",
                                        "forgotten"};
    print_counts(names, counts, sizeof names / sizeof *names);
    return 0;
}
