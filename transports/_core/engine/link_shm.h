/* The link to the other ranks of this host: messages go over a channel in shared memory
   (channel.h). */
#ifndef PC_LINK_SHM_H
#define PC_LINK_SHM_H

#include "drive.h"
#include "engine.h"

#include "channel/channel.h"

struct pc_shm_message;

/* What has come and was not told yet. */
struct pc_shm_queue {
    struct pc_shm_message *first, **last;
};

struct pc_shm_peer {
    int rank;                      /* in the job */
    /* messages, in order: the engine had no room for the first, or hears of it last */
    struct pc_shm_queue unreported;
    /* messages of which the engine has still to hear that they were taken back */
    uint32_t num_withdrawn;
    bool ends, finished, is_lost, is_mad, forgotten; /* `ends`: the next two are to be told */
};

struct pc_link_shm {
    struct pc_link link;     /* the first member */
    struct pc_source source; /* for the drive */
    pc_channel channel;
    struct pc_shm_peer *peers; /* by local rank */
    int *local;                /* by rank in the job; -1: not on this host */
    struct pc_shm_message *messages; /* all that the engine or the link knows */
    /* for a message in a ring, which is most often used while it is told */
    struct pc_shm_message *spare; /* with room for a payload of so many bytes */
    size_t spare_nbytes;
    struct pc_chains offers;         /* by peer and id */
    /* accepted or offered messages of which the end is to be told */
    struct pc_shm_queue over;
    struct pc_send *sent, *last_sent; /* sends of which the end is to be told */
    uint64_t num_kept; /* messages of rings that were not used at once; for tests */
    /* the doorbell has rung, for whatever thread; the caller's, to be set when it is open */
    void (*rung)(void *owner);
    void *owner;
#ifdef PC_DRIVE_CHECKED
    uint64_t ready_ns;
#endif
};

/* The other ranks of this host, `ranks` by local rank, this one among them. Host, doorbell and
   engine stay the caller's. `limits` has eager_limit, credit, message_cost and single_copy, and
   else zeros. 0, or an errno; it is to be freed whatever the result. */
int pc_link_shm_open(struct pc_link_shm *shm, struct pc_engine *engine, pc_host *host, int doorbell,
                     const int *ranks, const pc_channel *limits);
/* The direct way of short messages, past the engine's queues; with its lock, for peers that are
   there. Send a message of one part at once. False: nothing has happened, send it as any other. */
static inline bool pc_link_shm_post(struct pc_link_shm *shm, int rank, const void *header,
                                    size_t header_nbytes, const struct iovec *part) {
    return shm->local[rank] >= 0 &&
           pc_channel_post(&shm->channel, shm->local[rank], header, header_nbytes,
                           (struct pc_parts){part, 1}, part->iov_len, true);
}
/* The next message of a rank, if it lies in its ring or in a block, and all that came before has
   been told. It stays the next one until `pc_link_shm_took`. */
struct pc_shm_next {
    const unsigned char *header, *payload;
    size_t header_nbytes, nbytes;
    /* of its block: its sender may still be writing, or offer it elsewhere; NULL: all is there */
    struct pc_filling *filling;
};
/* 1; 0: nothing has come; -1: something else has, or must be told before. */
int pc_link_shm_next(struct pc_link_shm *shm, int rank, struct pc_shm_next *next);
/* As `pc_channel_fetch_offered`. */
static inline bool pc_link_shm_fetch_offered(struct pc_link_shm *shm, int rank,
                                             const struct pc_shm_next *next, void *into) {
    return pc_channel_fetch_offered(&shm->channel, shm->local[rank], next->filling, into,
                                    next->nbytes);
}
/* All of its payload was used. */
void pc_link_shm_took(struct pc_link_shm *shm, int rank, const struct pc_shm_next *next);
/* Tell all to whom something was sent that nothing more will come; 0, or -ENOMEM. Then let
   `pc_channel_flush` send what waits for room. */
int pc_link_shm_goodbye(struct pc_link_shm *shm);
/* Nobody copies from or to memory of this rank any more. */
void pc_link_shm_close(struct pc_link_shm *shm);
/* It is closed, or was never used, and the engine is freed. */
void pc_link_shm_free(struct pc_link_shm *shm);

#endif
