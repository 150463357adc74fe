/* Channels: the messages between this rank and the others of its host. See channel.c for what is
   sent, and ring.h, heap.h and transfer.h for where it is.

   A message has a header and a payload. A small one is *posted*: it is in shared memory when the
   call returns. A large one, or one that finds no room, is *offered*: its header goes, and the
   payload follows when the receiver accepts it; straight from memory to memory if the kernel allows
   that, else in fragments. A very small one that finds no room, and that nobody takes back, is
   *pushed*: its payload goes along with its header, and as one that was offered it is over when the
   receiver has used it. So many of them cost little more than few.

   Plain C, which knows nothing of Python. Nothing here locks: the caller does, for everything. */
#ifndef PC_CHANNEL_H
#define PC_CHANNEL_H

#include "host/arena.h"
#include "base/copy.h"
#include "base/chains.h"
#include "host/heap.h"
#include "host/host.h"
#include "ring.h"
#include "base/table.h"
#include "host/transfer.h"

#include <sys/types.h>

#ifndef PC_FRAGMENT_NBYTES
#define PC_FRAGMENT_NBYTES ((size_t)128 << 10)
#endif

/* Bytes after which who fills a block tells its reader. */
#define PC_FILL_NBYTES ((size_t)8 << 10)

/* Payloads that are buffered, but offered in their sender's memory first. */
#ifndef PC_OFFERED_NBYTES
#define PC_OFFERED_NBYTES ((size_t)12 << 10)
#endif

/* A payload of that length or less may be pushed: its copy is no longer than what is kept of an
   offer anyway. */
#define PC_PUSH_NBYTES ((size_t)256)

/* Bytes copied by one call of progress: it must come back to look at the other things. */
#ifndef PC_BUDGET
#define PC_BUDGET ((size_t)4 << 20)
#endif

enum pc_channel_kind {
    PC_EAGER = 1,   /* header, payload */
    PC_EAGER_HEAP,  /* block (filling, payload), header */
    PC_EAGER_WHOLE, /* block (filling, header, payload) */
    PC_PUSHED,      /* struct pc_pushed, payload, header */
    PC_READY,       /* struct pc_offer, header */
    PC_READY_WHOLE, /* struct pc_offer, block of the header */
    PC_TAKE,        /* id: the receiver copies, and may be helped */
    PC_GO,          /* id: send fragments */
    PC_DATA,        /* struct pc_fragment */
    PC_FINISHED,    /* id: the receiver needs it no more: it has it, or does not want it */
    PC_CANCEL,      /* id: the sender has taken it back */
    PC_BYE,         /* nothing more will come */
};

struct pc_offer {
    uint64_t id, nbytes;
    uint64_t address;   /* of the payload, or of a table of its parts */
    uint32_t num_parts;
    int32_t transfer;   /* -1: none was free, it can only go in fragments */
};

struct pc_pushed {
    uint64_t id, nbytes;
};

struct pc_fragment {
    uint64_t id, offset;
    struct pc_block block;
};

/* A rank's own page, in the place of its ring to itself. */
struct pc_desk {
    pc_flag64 version; /* counts up when a rank sends to this one for the first time */
    char pad[PC_LINE - 8];
    pc_flag64 pid;     /* 0: not there yet */
    uint64_t nonce_address, nonce; /* who can read it can copy */
    pc_flag64 closed;
    char pad2[PC_LINE - 32];
    pc_flag64 senders[]; /* bits: ranks that have sent to this one */
};

struct pc_note { /* an item that waits for room */
    struct pc_note *next;
    uint32_t kind;
    size_t body_nbytes, header_nbytes;
    unsigned char bytes[]; /* body, header */
};

struct pc_peer {
    struct pc_ring out, in;
    unsigned char *heap;
    struct pc_desk *desk;
    uint64_t charged;      /* credit used, ever */
    /* credit of the peer's that was used up here, ever, and as much as it knows of */
    uint64_t used, repaid;
    struct pc_note *first, *last;
    pid_t pid;
    /* Messages that could have offered the sender's memory, and what those that did not, or did,
       have cost lately: ns by KiB; 0: none was timed */
    uint32_t num_posted, costs[2];
    int8_t reach; /* 1: its memory can be read, -1: it cannot, 0: not tried */
    /* sends to it whose receiver has asked for fragments, in that order */
    struct pc_channel_send *first_asked, *last_asked;
    bool linked;  /* something was sent to it */
    bool active;  /* it has sent something */
    bool dead;
};

enum pc_mode {
    PC_OFFERED,
    PC_HELPING,
    PC_COPYING,
    PC_FRAGMENTS,
    PC_STALLED,
    PC_ABANDONED,
    PC_AHEAD,
};

struct pc_channel_send {
    uint64_t id;
    int peer;
    enum pc_mode mode;
    size_t nbytes, sent;
    struct pc_parts parts;
    struct iovec *table; /* of the parts */
    struct iovec one;
    /* of the memory: up to the caller; NULL: nobody needs to hear when it is used no more */
    void *owner;
    int transfer;    /* index, -1: none */
    bool stopped;    /* it goes no further: it will be given up */
    /* in PC_FRAGMENTS, until all are sent: those asked for before and after it */
    struct pc_channel_send *before, *after;
    bool is_asked;
    uint64_t pieces;
};

struct pc_channel_receive {
    struct pc_chained by_id; /* of peer and id, once it is accepted */
    uint64_t handle, id;
    int peer;
    enum pc_mode mode;
    size_t nbytes, filled;
    unsigned char *into;
    void *owner;
    struct pc_parts parts;
    struct iovec *table;
    struct iovec one;
    struct pc_transfer *transfer;
    uint64_t pieces;
};

struct pc_channel_list { /* numbers of what progress has to look at */
    uint64_t *numbers;
    uint32_t count, size;
};

/* A message that has come. */
struct pc_came {
    /* PC_EAGER; PC_EAGER_HEAP: its payload is in a block; PC_PUSHED: `pc_channel_tell` with
       PC_FINISHED and its id must follow when it is used, or dropped; PC_READY: it is offered */
    enum pc_channel_kind kind;
    int peer;
    const void *header;
    size_t header_nbytes;
    const unsigned char *payload; /* NULL: it is offered */
    size_t nbytes;
    struct pc_block block;
    struct pc_offer offer; /* of one that is pushed only the id */
};

/* What is told to the caller, in the order in which it happens: all but `release` by progress
   alone. A pointer is good for the call only, but a block is the caller's until
   `pc_channel_consume`. */
struct pc_channel_up {
    void (*came)(void *owner, const struct pc_came *came);
    void (*sent)(void *owner, uint64_t id);
    void (*cancelled)(void *owner, int peer, uint64_t id);
    void (*received)(void *owner, uint64_t handle);
    void (*withdrawn)(void *owner, uint64_t handle);
    void (*bye)(void *owner, int peer);
    void (*lost)(void *owner, int peer);
    void (*release)(void *owner, void *memory); /* the owner of memory that is used no more */
};

typedef struct pc_channel {
    pc_host *host;
    const struct pc_channel_up *up;
    void *owner;
    int rank, size;
    bool single_copy, closed;
    size_t eager_limit, inline_limit;
    uint64_t credit, message_cost;
    struct pc_peer *peers;
    int *active; /* peers that have sent something */
    int num_active;
    uint64_t seen_version;
    uint32_t backlogged; /* peers with notes */
    struct pc_heap heap;
    int16_t free_transfers[PC_TRANSFERS];
    int num_free_transfers;
    struct pc_table sends, receives;
    struct pc_chains receives_by_id;
    /* sends whose receiver lets them help; receives that copy: no more than transfers */
    struct pc_channel_list helping, receiving;
    uint32_t num_asked; /* sends that are asked for fragments */
    uint64_t nonce;
} pc_channel;

/* channel.c */
void pc_channel_send_asked(pc_channel *channel, struct pc_channel_send *send);
/* It is not asked for, or not any more. */
void pc_channel_send_unasked(pc_channel *channel, struct pc_channel_send *send);
/* The first that may go on: it takes what room there is. */
struct pc_channel_send *pc_channel_first_asked(pc_channel *channel, int rank);
bool pc_channel_list_add(struct pc_channel_list *list, uint64_t number);
void pc_channel_list_remove(struct pc_channel_list *list, uint64_t number);
/* `channel` has host, up, owner, limits, single_copy, and else zeros. 0, or an errno; E2BIG: the
   host has too many ranks. It is to be freed whatever the result. */
int pc_channel_open(pc_channel *channel);
void pc_channel_free(pc_channel *channel);
/* Whether the kernel lets the processes copy from and to each other's memory. */
bool pc_channel_reaches(pc_channel *channel, int peer);
/* Whether a payload in one piece, at `address` in the peer's memory, can be copied from there. */
bool pc_channel_can_fetch(pc_channel *channel, int peer, uint64_t address, size_t nbytes);
/* Copy bytes from `offset` of a peer's payload of `whole` bytes to `into`, or of our payload to
   `into` in the peer's memory: by ourselves where it is mapped, else by the kernel. As
   pc_copy_from. */
int pc_channel_fetch(pc_channel *channel, int peer, struct pc_parts theirs, size_t offset,
                     void *into, size_t nbytes, size_t whole);
int pc_channel_store(pc_channel *channel, int peer, uint64_t into, struct pc_parts ours,
                     size_t offset, size_t nbytes, size_t whole);

/* Post a message; false: there is no room or no credit. With `may_wait`, which is for one part, its
   receiver has a moment to copy it from there. */
bool pc_channel_post(pc_channel *channel, int peer, const void *header, size_t header_nbytes,
                     struct pc_parts parts, size_t nbytes, bool may_wait);
/* Copy what comes in a block straight from its sender's memory. False: that is not offered, or not
   any more; then it will be in the block. */
bool pc_channel_fetch_offered(pc_channel *channel, int peer, struct pc_filling *filling, void *into,
                              size_t nbytes);
/* Offer one. `send` has peer, parts, nbytes, owner; it belongs to the channel from now on. Its id;
   0: there is no memory, and it has been freed. */
uint64_t pc_channel_offer(pc_channel *channel, struct pc_channel_send *send, const void *header,
                          size_t header_nbytes);
/* Whether one may be pushed: it goes into one item. */
static inline bool pc_channel_may_push(const pc_channel *channel, size_t header_nbytes,
                                       size_t nbytes) {
    size_t total = PC_ITEM_NBYTES + sizeof(struct pc_pushed) + nbytes + header_nbytes;
    return nbytes <= PC_PUSH_NBYTES && total <= channel->inline_limit;
}
/* Push it; its payload is copied. As pc_channel_offer. */
uint64_t pc_channel_push(pc_channel *channel, struct pc_channel_send *send, const void *header,
                         size_t header_nbytes, const void *payload);
/* Free an offered message that needs no more; `finished` by its receiver, or taken back before it
   was taken. */
void pc_channel_send_end(pc_channel *channel, struct pc_channel_send *send, bool reuse_transfer);
void pc_channel_send_free(pc_channel *channel, struct pc_channel_send *send);
/* Stop it if that is possible; false: the receiver has it, or will have it. */
bool pc_channel_send_stop(pc_channel *channel, struct pc_channel_send *send);
void pc_channel_send_give_up(pc_channel *channel, struct pc_channel_send *send);
/* Copy up to `budget` bytes into the receiver's memory; false: nothing is left to copy. Needs no
   lock. */
bool pc_channel_send_help(pc_channel *channel, struct pc_channel_send *send, size_t budget);

/* Say something about a message: kind, and its id. 0; -1: there is no memory. */
int pc_channel_tell(pc_channel *channel, int peer, enum pc_channel_kind kind, uint64_t id);
/* Count what was used of a peer's credit. */
void pc_channel_use(pc_channel *channel, int peer, size_t nbytes);
/* A buffered message was used that has come in a block. */
void pc_channel_consume(pc_channel *channel, int peer, size_t nbytes, const struct pc_block *block);

/* Accept an offer. 1: it goes on; 0: done; -1: taken back; -2: the sender has left; -3: no
   memory. */
int pc_channel_accept(pc_channel *channel, struct pc_channel_receive *receive,
                      const struct pc_offer *offer);
/* The steps of that. Where a copy stands: */
enum pc_outcome { PC_MORE, PC_WAITS, PC_COMPLETE, PC_TOO_LATE, PC_FAILED, PC_GONE };
/* Copy at most `budget` bytes. Needs no lock. */
enum pc_outcome pc_channel_receive_copy(pc_channel *channel, struct pc_channel_receive *receive,
                                        size_t budget);
/* Wait until the sender copies nothing to `into` any more: at most for the piece that it is at. */
void pc_channel_receive_settle(pc_channel *channel, struct pc_channel_receive *receive);
/* Tell the sender that nothing more will be copied. */
void pc_channel_receive_finish(pc_channel *channel, struct pc_channel_receive *receive,
                               bool complete);

void pc_channel_receive_end(pc_channel *channel, struct pc_channel_receive *receive);
void pc_channel_receive_give_up(pc_channel *channel, struct pc_channel_receive *receive);
/* Have it go on elsewhere; what was there is copied, and its owner released. 0; -1: no memory. */
int pc_channel_receive_redirect(pc_channel *channel, struct pc_channel_receive *receive,
                                unsigned char *into, void *owner);

void pc_channel_forget(pc_channel *channel, int peer);
/* Do what can be done without waiting. 1: that was something; 0: nothing; -1: no memory. */
int pc_channel_progress(pc_channel *channel);
/* Whether progress would find something. */
bool pc_channel_ready(pc_channel *channel);
/* Whether the first note for a rank would find room now. */
bool pc_channel_has_room(pc_channel *channel, int rank);
/* Send what waits for room; true: something still waits. */
bool pc_channel_flush(pc_channel *channel);
/* End: nobody copies from or to this rank's memory any more. */
void pc_channel_close(pc_channel *channel);

static inline struct pc_transfer *pc_transfer_of(unsigned char *heap, int index) {
    return (struct pc_transfer *)pc_heap_at(heap, PC_TRANSFERS_UNIT) + index;
}
static inline uint64_t pc_credit_left(pc_channel *channel, struct pc_peer *peer) {
    return channel->credit - (peer->charged - pc_load(&peer->out.head->repaid));
}

/* --- what several files of channels do -------------------------------------------------------- */

static inline struct pc_transfer *pc_channel_transfer(pc_channel *channel,
                                                      struct pc_channel_send *send) {
    return send->transfer < 0 ? NULL : pc_transfer_of(channel->heap.base, send->transfer);
}

/* A piece of a payload: its length. */
static inline size_t pc_channel_piece(const struct pc_channel_receive *receive, int64_t piece,
                                      size_t *offset) {
    size_t nbytes = pc_piece_nbytes(receive->nbytes);
    *offset = (size_t)piece * nbytes;
    return receive->nbytes - *offset < nbytes ? receive->nbytes - *offset : nbytes;
}

/* Ask for fragments. */
static inline int pc_channel_ask(pc_channel *channel, struct pc_channel_receive *receive) {
    receive->mode = PC_FRAGMENTS;
    receive->filled = 0;
    return pc_channel_tell(channel, receive->peer, PC_GO, receive->id);
}

static inline unsigned char *pc_channel_block_at(struct pc_peer *peer, const struct pc_block *block,
                                                 size_t nbytes) {
    return pc_block_valid(block, nbytes) ? pc_heap_at(peer->heap, block->unit) : NULL;
}

/* Whether all of an item is there: a block may still be being filled. */
static inline bool pc_channel_is_whole(struct pc_peer *peer, struct pc_item *item) {
    struct pc_block block;
    uint32_t kind = pc_item_kind(item);
    if (PC_LIKELY(kind != PC_EAGER_HEAP && kind != PC_EAGER_WHOLE))
        return true;
    memcpy(&block, item->body, sizeof block);
    struct pc_filling *filling =
        (struct pc_filling *)pc_channel_block_at(peer, &block, sizeof *filling);
    return filling == NULL || pc_load(&filling->nbytes) >= item->nbytes;
}

#endif
