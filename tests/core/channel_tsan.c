/* The channels' shared memory under ThreadSanitizer: two ranks as threads of one program.

       channel_tsan MESSAGES SEED

   The sender sends numbered messages of random kinds: in the ring, in blocks of a heap, some of
   which offer its own memory first, and as transfers that both copy. Either side gives up at
   random. The receiver checks every byte, sleeps
   when nothing is there, and writes to its memory whenever the protocol says that nobody else does;
   so does the sender with its own. */
#include "host/heap.h"
#include "channel/ring.h"
#include "host/transfer.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define RING_NBYTES ((size_t)8192)
#define LARGE ((size_t)1200 << 10)
#define TRANSFERS 4

enum kind { SMALL = 1, BLOCK, OFFER, FINISHED, END };

struct side { /* of one rank, in shared memory: whether it sleeps */
    pc_flag32 asleep;
    char pad[PC_LINE - 4];
};

static unsigned char *there, *back, *heap;
static struct side *sides;
static int doorbells[2];
static uint64_t messages;
static uint64_t counts[6]; /* for the reader of the output: what happened how often */

static void fail(const char *what, uint64_t number) {
    fprintf(stderr, "channel_tsan: %s (message %llu)\n", what, (unsigned long long)number);
    _exit(1);
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static void fill(unsigned char *memory, size_t nbytes, uint64_t number) {
    memset(memory, (int)(number % 251), nbytes);
}

static void check(const unsigned char *memory, size_t nbytes, uint64_t number) {
    for (size_t index = 0; index < nbytes; index++)
        if (memory[index] != number % 251)
            fail("the payload is wrong", number);
}

/* Memory that is offered may be read when it is the sender's again: nobody uses what was read. */
static void fill_offered(unsigned char *memory, size_t nbytes, uint64_t number) {
    for (size_t index = 0; index < nbytes; index++)
        __atomic_store_n(memory + index, (unsigned char)(number % 251), __ATOMIC_RELAXED);
}

static void copy_offered(unsigned char *into, const unsigned char *memory, size_t nbytes) {
    for (size_t index = 0; index < nbytes; index++)
        into[index] = __atomic_load_n(memory + index, __ATOMIC_RELAXED);
}

/* --- sleeping, as pc_host_sleep and pc_host_wake do it ---------------------------------------- */

static void wake(int who) {
    uint64_t one = 1;
    if (atomic_load(&sides[who].asleep) && write(doorbells[who], &one, sizeof one) != sizeof one)
        fail("the doorbell is broken", 0);
}

static void sleep_until(int me, struct pc_ring *ring) {
    struct pc_item *item;
    uint64_t count;
    atomic_exchange(&sides[me].asleep, 1);
    if (pc_ring_peek(ring, &item) == 0) {
        struct pollfd bell = {.fd = doorbells[me], .events = POLLIN};
        if (poll(&bell, 1, 20000) != 1)
            fail("a rank was not woken", 0);
    }
    atomic_store(&sides[me].asleep, 0);
    ssize_t ignored = read(doorbells[me], &count, sizeof count);
    (void)ignored;
}

/* --- the sender ------------------------------------------------------------------------------- */

struct sender {
    struct pc_ring out, in;
    struct pc_heap *heap;
    uint64_t random;
};

static struct pc_item *reserve(struct sender *sender, size_t nbytes) {
    struct pc_item *item;
    while ((item = pc_ring_reserve(&sender->out, nbytes)) == NULL)
        sched_yield();
    return item;
}

static void publish(struct sender *sender, struct pc_item *item, enum kind kind, size_t nbytes,
                    size_t total) {
    item->kind_and_header = (uint32_t)kind << 24;
    item->nbytes = (uint32_t)nbytes;
    pc_ring_publish(&sender->out, item, total);
    wake(1);
}

static void send_small(struct sender *sender, uint64_t number) {
    size_t nbytes = next_random(&sender->random) % 900;
    struct pc_item *item = reserve(sender, PC_ITEM_NBYTES + nbytes);
    fill(item->body, nbytes, number);
    publish(sender, item, SMALL, nbytes, PC_ITEM_NBYTES + nbytes);
}

/* Whether the receiver has copied what is offered before the sender is out of patience. */
static bool was_copied(struct sender *sender, struct pc_filling *filling) {
    for (uint64_t left = next_random(&sender->random) % 4 * 2000; left > 0; left--) {
        if (pc_load(&filling->direct) == PC_DIRECT_COPIED)
            break;
        pc_relax();
    }
    bool copied = !pc_filling_take_back(filling);
    counts[copied ? 4 : 5]++;
    return copied;
}

static void send_block(struct sender *sender, uint64_t number, unsigned char *memory) {
    size_t nbytes = next_random(&sender->random) % 60000;
    struct pc_block block;
    uint32_t unit;
    while ((unit = pc_heap_take(sender->heap, PC_ROOM_PAYLOADS, sizeof(struct pc_filling) + nbytes,
                                1, false)) == 0)
        sched_yield();
    pc_heap_name(sender->heap, unit, &block);
    struct pc_filling *filling = (struct pc_filling *)pc_heap_at(heap, unit);
    bool offers = next_random(&sender->random) % 2;
    pc_filling_begin(filling, offers, (uintptr_t)memory);
    if (offers)
        fill_offered(memory, nbytes, number);
    struct pc_item *item = reserve(sender, PC_ITEM_NBYTES + sizeof block);
    memcpy(item->body, &block, sizeof block);
    publish(sender, item, BLOCK, nbytes, PC_ITEM_NBYTES + sizeof block);
    if (offers) {
        bool copied = was_copied(sender, filling);
        fill_offered(memory, nbytes, number + 1); /* it is ours again */
        if (copied)
            return;
    }
    for (size_t filled = 0; filled < nbytes;) {
        size_t piece = nbytes - filled < 8192 ? nbytes - filled : 8192;
        fill((unsigned char *)(filling + 1) + filled, piece, number);
        filled += piece;
        atomic_store_explicit(&filling->nbytes, filled, memory_order_release);
    }
}

struct offer {
    uint64_t id, nbytes, taken_back;
    const unsigned char *address;
};

/* Of what was seen to be done the receiver may have told, too: ids that are passed over. */
static void await_finished(struct sender *sender, uint64_t id) {
    for (uint64_t theirs = 0; theirs != id;) {
        struct pc_item *item;
        int64_t nbytes;
        while ((nbytes = pc_ring_peek(&sender->in, &item)) == 0)
            sleep_until(0, &sender->in);
        memcpy(&theirs, item->body, sizeof theirs);
        if (theirs > id)
            fail("a message is finished that was not sent yet", id);
        pc_ring_consume(&sender->in, nbytes);
    }
}

static void send_large(struct sender *sender, uint64_t number, unsigned char *memory) {
    struct pc_transfer *transfer =
        (struct pc_transfer *)pc_heap_at(heap, PC_TRANSFERS_UNIT) + number % TRANSFERS;
    struct offer offer = {
        .id = number + 1, .nbytes = next_random(&sender->random) % LARGE, .address = memory};
    uint64_t pieces = pc_pieces(offer.nbytes), piece_nbytes = pc_piece_nbytes(offer.nbytes);
    bool helps = next_random(&sender->random) % 4 != 0,
         gives_back = next_random(&sender->random) % 8 == 0;
    uint64_t patience =
        next_random(&sender->random) % 2 ? 1000000 : next_random(&sender->random) % 2000;
    fill(memory, offer.nbytes, number);
    pc_transfer_begin(transfer, offer.id, true);
    struct pc_item *item = reserve(sender, PC_ITEM_NBYTES + sizeof offer);
    memcpy(item->body, &offer, sizeof offer);
    publish(sender, item, OFFER, 0, PC_ITEM_NBYTES + sizeof offer);
    while (patience-- > 0 && pc_load(&transfer->state) != pc_phase_of(offer.id, PC_PHASE_DONE)) {
        int64_t piece = helps ? pc_transfer_claim(transfer, pieces) : -1;
        if (piece < 0) {
            pc_relax();
            continue;
        }
        if (gives_back) { /* it cannot copy: the receiver must */
            pc_transfer_return(transfer, piece);
            wake(1);
            helps = false;
            continue;
        }
        size_t offset = (size_t)piece * piece_nbytes;
        size_t length = offer.nbytes - offset < piece_nbytes ? offer.nbytes - offset : piece_nbytes;
        unsigned char *into =
            (unsigned char *)(uintptr_t)atomic_load_explicit(&transfer->into, memory_order_relaxed);
        memcpy(into + offset, memory + offset, length);
        pc_transfer_copied(transfer);
    }
    pc_publish(&transfer->watched, 0);
    if (pc_load(&transfer->state) == pc_phase_of(offer.id, PC_PHASE_DONE)) {
        counts[0]++;
        return;
    }
    if (next_random(&sender->random) % 2 == 0) {
        if (pc_transfer_step(transfer, offer.id, PC_PHASE_WAITING, PC_PHASE_WITHDRAWN)) {
            counts[1]++;
            return;
        }
        counts[2] += pc_transfer_take_back(transfer);
    }
    await_finished(sender, offer.id);
    counts[3]++;
}

static void *send_all(void *argument) {
    static struct pc_heap blocks;
    struct sender sender = {.heap = &blocks, .random = *(uint64_t *)argument};
    unsigned char *memory = malloc(LARGE), *offered = malloc(LARGE);
    blocks.base = heap;
    pc_ring_open(&sender.out, there, RING_NBYTES);
    pc_ring_open(&sender.in, back, RING_NBYTES);
    for (uint64_t number = 0; number < messages; number++) {
        uint64_t which = next_random(&sender.random) % 16;
        if (which < 10)
            send_small(&sender, number);
        else if (which < 13)
            send_block(&sender, number, offered);
        else
            send_large(&sender, number, memory);
    }
    struct pc_item *item = reserve(&sender, PC_ITEM_NBYTES);
    publish(&sender, item, END, 0, PC_ITEM_NBYTES);
    free(memory);
    free(offered);
    return NULL;
}

/* --- the receiver ----------------------------------------------------------------------------- */

struct receiver {
    struct pc_ring in, out;
    uint64_t random;
    unsigned char *into, *elsewhere;
};

static void finish(struct receiver *receiver, struct pc_transfer *transfer, uint64_t id,
                   bool complete) {
    if (complete)
        pc_publish(&transfer->state, pc_phase_of(id, PC_PHASE_DONE));
    if (complete && pc_load(&transfer->watched) != 0)
        return;
    struct pc_item *item;
    while ((item = pc_ring_reserve(&receiver->out, PC_ITEM_NBYTES + sizeof id)) == NULL)
        sched_yield();
    memcpy(item->body, &id, sizeof id);
    item->kind_and_header = (uint32_t)FINISHED << 24;
    item->nbytes = 0;
    pc_ring_publish(&receiver->out, item, PC_ITEM_NBYTES + sizeof id);
    wake(0);
}

static void settle(struct pc_transfer *transfer) {
    pc_transfer_close(transfer);
    while (!pc_transfer_settled(transfer))
        sched_yield();
}

static void receive_large(struct receiver *receiver, const struct offer *offer, uint64_t number) {
    struct pc_transfer *transfer =
        (struct pc_transfer *)pc_heap_at(heap, PC_TRANSFERS_UNIT) + number % TRANSFERS;
    uint64_t pieces = pc_pieces(offer->nbytes), piece_nbytes = pc_piece_nbytes(offer->nbytes);
    unsigned char *into = receiver->into;
    if (!pc_transfer_step(transfer, offer->id, PC_PHASE_WAITING, PC_PHASE_TAKEN))
        return;
    if (!pc_transfer_open(transfer, (uint64_t)(uintptr_t)into, 0)) {
        finish(receiver, transfer, offer->id, false);
        return;
    }
    uint64_t gives_up = next_random(&receiver->random) % 40,
             redirects = next_random(&receiver->random) % 20;
    for (uint64_t turn = 0;; turn++) {
        if (turn == gives_up || pc_transfer_taken_back(transfer)) {
            settle(transfer);
            memset(into, 255, offer->nbytes); /* it is ours again */
            finish(receiver, transfer, offer->id, false);
            return;
        }
        if (turn == redirects) {
            settle(transfer);
            int64_t returned = pc_transfer_returned(transfer);
            uint64_t claimed = pc_load(&transfer->next) & ~PC_MARKS;
            if (returned >= 0) {
                size_t offset = (size_t)returned * piece_nbytes;
                size_t length =
                    offer->nbytes - offset < piece_nbytes ? offer->nbytes - offset : piece_nbytes;
                memcpy(into + offset, offer->address + offset, length);
                pc_transfer_copied(transfer);
            }
            size_t length =
                claimed * piece_nbytes < offer->nbytes ? claimed * piece_nbytes : offer->nbytes;
            memcpy(receiver->elsewhere, into, length);
            memset(into, 255, offer->nbytes);
            into = receiver->elsewhere;
            pc_transfer_open(transfer, (uint64_t)(uintptr_t)into, claimed);
            continue;
        }
        int64_t piece = pc_transfer_claim(transfer, pieces);
        if (piece < 0)
            piece = pc_transfer_returned(transfer);
        if (piece >= 0) {
            size_t offset = (size_t)piece * piece_nbytes;
            size_t length =
                offer->nbytes - offset < piece_nbytes ? offer->nbytes - offset : piece_nbytes;
            memcpy(into + offset, offer->address + offset, length);
            pc_transfer_copied(transfer);
        } else if (pc_transfer_complete(transfer, pieces)) {
            bool complete = pc_transfer_seal(transfer);
            if (complete)
                check(into, offer->nbytes, number);
            finish(receiver, transfer, offer->id, complete);
            return;
        } else {
            pc_relax();
        }
    }
}

static void *receive_all(void *argument) {
    struct receiver receiver = {
        .random = *(uint64_t *)argument, .into = malloc(LARGE), .elsewhere = malloc(LARGE)};
    pc_ring_open(&receiver.in, there, RING_NBYTES);
    pc_ring_open(&receiver.out, back, RING_NBYTES);
    for (uint64_t number = 0;; number++) {
        struct pc_item *item;
        int64_t nbytes = pc_ring_peek(&receiver.in, &item);
        while (nbytes == 0) {
            sleep_until(1, &receiver.in);
            nbytes = pc_ring_peek(&receiver.in, &item);
        }
        if (nbytes < 0)
            fail("this is no item", number);
        switch ((enum kind)pc_item_kind(item)) {
        case SMALL:
            check(item->body, item->nbytes, number);
            break;
        case BLOCK: {
            struct pc_block block;
            memcpy(&block, item->body, sizeof block);
            if (!pc_block_valid(&block, sizeof(struct pc_filling) + item->nbytes))
                fail("there is no such block", number);
            struct pc_filling *filling = (struct pc_filling *)pc_heap_at(heap, block.unit);
            size_t done = 0;
            if (next_random(&receiver.random) % 4 > 0 &&
                pc_filling_step(filling, PC_DIRECT_OFFERED, PC_DIRECT_TAKEN)) {
                copy_offered(receiver.into, (unsigned char *)(uintptr_t)filling->address,
                             item->nbytes);
                bool can = next_random(&receiver.random) % 8 > 0;
                if (pc_filling_step(filling, PC_DIRECT_TAKEN,
                                    can ? PC_DIRECT_COPIED : PC_DIRECT_NO) &&
                    can) {
                    check(receiver.into, item->nbytes, number);
                    done = item->nbytes;
                }
            }
            while (done < item->nbytes) {
                size_t filled = pc_load(&filling->nbytes);
                check((unsigned char *)(filling + 1) + done, filled - done, number);
                done = filled;
            }
            pc_block_give_back(heap, &block);
            break;
        }
        case OFFER: {
            struct offer offer;
            memcpy(&offer, item->body, sizeof offer);
            receive_large(&receiver, &offer, number);
            break;
        }
        case END:
            if (number != messages)
                fail("messages are missing", number);
            free(receiver.into);
            free(receiver.elsewhere);
            return NULL;
        default:
            fail("what is this?", number);
        }
        pc_ring_consume(&receiver.in, nbytes);
        if (next_random(&receiver.random) % 64 == 0)
            sched_yield();
    }
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: channel_tsan MESSAGES SEED\n");
        return 2;
    }
    messages = strtoull(arguments[1], NULL, 10);
    uint64_t seeds[2] = {strtoull(arguments[2], NULL, 10) * 2 + 1,
                         strtoull(arguments[2], NULL, 10) * 2 + 3};
    size_t nbytes = 2 * RING_NBYTES + PC_HEAP_NBYTES + PC_PAGE;
    unsigned char *memory =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 2;
    there = memory;
    back = memory + RING_NBYTES;
    heap = memory + 2 * RING_NBYTES;
    sides = (struct side *)(heap + PC_HEAP_NBYTES);
    for (int who = 0; who < 2; who++)
        doorbells[who] = eventfd(0, EFD_NONBLOCK);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, send_all, &seeds[0]);
    pthread_create(&threads[1], NULL, receive_all, &seeds[1]);
    for (int who = 0; who < 2; who++)
        pthread_join(threads[who], NULL);
    printf("watched %llu, withdrawn %llu, taken back %llu, told %llu, copied %llu, filled %llu\n",
           (unsigned long long)counts[0], (unsigned long long)counts[1],
           (unsigned long long)counts[2], (unsigned long long)counts[3],
           (unsigned long long)counts[4], (unsigned long long)counts[5]);
    if (messages >= 500 && (counts[4] == 0 || counts[5] == 0))
        fail("no offer was taken, or all were", messages);
    return 0;
}
