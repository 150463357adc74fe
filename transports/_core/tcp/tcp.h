/* TCP: the messages between this rank and others, over connected sockets. Plain C, which knows
   nothing of Python: who connects and who may is decided elsewhere (transports/dial.py); here come
   descriptors on which only ranks of the job are, though what they send is not believed either.

   A message has a header and a payload. A small one is *buffered*: written at once, or copied. A
   larger one that nobody will take back may be *pushed*: its payload follows at once, from the
   sender's memory, and the receiver reads it into the place where it is wanted. Any other is
   *offered*: its header goes, and its payload follows in fragments when the receiver has accepted
   it.

   A link has one connection or several, its *lanes*. All but fragments go by the first one, in
   order. Fragments are pulled by whichever lane has nothing else to write, so that a slow one takes
   fewer.

   Nothing here locks: the caller does, for everything. */
#ifndef PC_TCP_H
#define PC_TCP_H

#include "base/table.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Bytes of a payload that one lane takes at a time, and that one call writes. A call keeps the
   socket locked: meanwhile the kernel frees nothing of what the peer has received, and it stops
   when its buffer is full. */
#ifndef PC_TCP_FRAGMENT
#define PC_TCP_FRAGMENT ((size_t)512 << 10)
#endif
#ifndef PC_TCP_LONGEST_HEADER
#define PC_TCP_LONGEST_HEADER ((size_t)64 << 10)
#endif
#define PC_TCP_LANES 16

/* While so many bytes and more move, progress goes on. */
#ifndef PC_TCP_LONG
#define PC_TCP_LONG ((size_t)64 << 10)
#endif

/* Bytes read or written by one call, which must come back to look at the other things. */
#ifndef PC_TCP_BUDGET
#define PC_TCP_BUDGET ((size_t)4 << 20)
#endif

/* While large payloads move, progress waits so long for more of them, and goes on for so long. */
#ifndef PC_TCP_MOMENT_NS
#define PC_TCP_MOMENT_NS 100000
#endif
#ifndef PC_TCP_AT_ONCE_NS
#define PC_TCP_AT_ONCE_NS 1000000
#endif

enum pc_tcp_kind {
    PC_TCP_EAGER = 1, /* header, payload */
    PC_TCP_AHEAD,     /* header, payload: pushed */
    /* id, value: bytes of the payload; header: a message that waits to be accepted */
    PC_TCP_READY,
    PC_TCP_GO,        /* id was accepted; value: the number that the receiver gave it */
    PC_TCP_DATA,      /* id: that number; value: the offset; a fragment */
    PC_TCP_DROP,      /* id: nobody wants it, or not any more */
    PC_TCP_CANCEL,    /* id was taken back */
    PC_TCP_CREDIT,    /* value: bytes that were consumed; id 1: of pushed ones */
    /* nothing more will come; value: bytes of payloads that went by all lanes, small ones aside */
    PC_TCP_BYE,
};

/* What every frame begins with; the numbers have the order of bytes of both sides,
   little-endian. */
struct pc_tcp_frame {
    uint32_t kind : 8, header : 24; /* bytes of the header that follows */
    uint32_t nbytes;                /* of the payload that follows that */
    uint64_t id, value;
};

/* A message that was offered, or one that was pushed and is not written yet. */
struct pc_tcp_send {
    uint64_t id;
    int peer;
    bool pushed, accepted, stopped;
    size_t nbytes, next, written; /* of the payload: in all, given to lanes, with the kernel */
    uint64_t theirs;              /* the receiver's number */
    struct iovec *parts;          /* of the payload; freed with this */
    size_t num_parts;
    void *owner; /* of the memory: up to the caller */
    bool is_active; /* accepted, with fragments to be pulled: those before and after it */
    struct pc_tcp_send *prev_active, *next_active;
};

/* A message that was accepted, or one that was pushed and is being read. */
struct pc_tcp_receive {
    uint64_t handle, id;
    int peer;
    bool pushed;
    size_t nbytes, filled;
    unsigned char *into;
    unsigned char *spare; /* `into` is memory of ours, for want of another place */
    void *owner;
};

/* Something to be written: its head, then a piece of a payload. */
struct pc_tcp_out {
    struct pc_tcp_out *next;
    struct pc_tcp_send *send; /* whose payload; NULL: the piece is in `copy`, or there is none */
    unsigned char *copy;
    size_t from, nbytes;
    size_t head_nbytes, done; /* bytes written */
    unsigned char head[];
};

struct pc_tcp_lane {
    int fd; /* -1: there is none, or not any more */
    uint32_t watched;
    bool full;           /* the kernel took no more */
    bool stalled;        /* what was pushed has no place yet */
    bool ended;          /* no more can be read */
    struct pc_tcp_out *first, *last;
    unsigned char *buffer;
    size_t start, end;   /* of what was read and not used */
    uint64_t handle;     /* of the payload that is being read; it may have no receive any more */
    size_t offset, rest; /* where the next byte of it belongs, and how many are to come */
};

struct pc_tcp_peer {
    struct pc_tcp_lane *lanes; /* NULL: not linked yet */
    struct pc_tcp_out *first, *last; /* what waits for the link */
    struct pc_tcp_send *active, *last_active; /* which have their turns in that order */
    struct pc_tcp_peer *next_granted;
    bool granted;               /* it has accepted something, of which nothing is written yet */
    uint64_t owed[2];  /* bytes that wait at the peer: buffered, pushed */
    uint64_t held[2];  /* the peer's that wait here */
    uint64_t unrepaid; /* consumed, and it was not told */
    /* bytes of payloads, small ones aside: that lanes have to write, and have read */
    uint64_t given, taken;
    uint64_t in_all;   /* of those, how many come before the goodbye */
    bool used;         /* something was sent */
    bool leaving;      /* it has said goodbye, and other lanes may still bring payloads */
    bool bye, lost, forgotten;
    bool doubtful;     /* a lane has ended: either a goodbye comes, or it is lost */
};

/* What is told to the caller, in the order in which it happens. A pointer is good for the call
   only. */
struct pc_tcp_up {
    void (*arrived)(void *owner, int peer, const void *header, size_t header_nbytes,
                    const void *payload, size_t nbytes);
    void (*offered)(void *owner, int peer, const void *header, size_t header_nbytes,
                    uint64_t nbytes, uint64_t id);
    /* It is being read: give it a place by `pc_tcp_place`, before the next progress, or have it
       kept. */
    void (*pushed)(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes,
                   uint64_t handle);
    /* the owner of its memory, which was released */
    void (*sent)(void *owner, uint64_t id, void *memory);
    void (*received)(void *owner, uint64_t handle);
    void (*cancelled)(void *owner, int peer, uint64_t id);
    void (*bye)(void *owner, int peer);
    void (*lost)(void *owner, int peer, const char *why);
    void (*watched)(void *owner); /* what `pc_tcp_watch` was given is readable */
    void (*release)(void *owner, void *memory); /* the owner of memory that is used no more */
    /* What was pushed and has no place is all here, in `spare`. NULL: nobody asks. */
    void (*kept)(void *owner, uint64_t handle);
};

struct pc_tcp_limits {
    size_t eager, ahead, credit, message_cost;
};

struct pc_tcp {
    int rank, size, num_lanes, epoll;
    struct pc_tcp_limits limits;
    const struct pc_tcp_up *up;
    void *owner;
    struct pc_tcp_peer *peers;
    struct pc_table sends, receives;
    size_t buffer_nbytes;
    /* the send that is being started: who starts it learns otherwise that it is done */
    uint64_t starting;
    struct pc_tcp_peer *granted; /* the first of those that are */
    int behind;   /* things that wait to be written */
    int restless; /* lanes that are stalled, links in doubt: progress has something to do */
    size_t moved; /* bytes of payloads, since progress has looked last */
    /* set by the caller if it has been told something that it has not handled: progress returns
       soon */
    bool has_unhandled;
    bool closing;
};

/* 0, or an errno. */
int pc_tcp_open(struct pc_tcp *tcp);
void pc_tcp_free(struct pc_tcp *tcp);
/* Take over a connected socket, which does not block. 0, or an errno: then it stays the
   caller's. */
int pc_tcp_attach(struct pc_tcp *tcp, int peer, int lane, int fd);
/* Have `watched` called when a descriptor is readable. 0, or an errno. */
int pc_tcp_watch(struct pc_tcp *tcp, int fd);

/* Send a message. 0: it is buffered; else the number of an offer, or of one that was pushed if it
   may be: its memory is used until `sent`. `send` has peer, parts, nbytes, owner, and belongs to
   this from then on, unless it was buffered. -1: no memory. */
int64_t pc_tcp_send(struct pc_tcp *tcp, struct pc_tcp_send *send, const void *header,
                    size_t header_nbytes, bool may_push);
int64_t pc_tcp_offer(struct pc_tcp *tcp, struct pc_tcp_send *send, const void *header,
                     size_t header_nbytes);
/* Stop a send if it can be stopped; false: it is too late, or it is not there. */
bool pc_tcp_stop(struct pc_tcp *tcp, uint64_t id);
/* Give up a send: its memory is not used any more. */
void pc_tcp_take_back(struct pc_tcp *tcp, uint64_t id);

/* Accept what was offered. The handle; -1: no memory. */
int64_t pc_tcp_accept(struct pc_tcp *tcp, int peer, uint64_t id, void *into, size_t nbytes,
                      void *owner);
/* Give what was pushed its place. True: it is there, and `handle` is free; false: it will be, or
   there is no such. */
bool pc_tcp_place(struct pc_tcp *tcp, uint64_t handle, void *into, void *owner);
/* Have a receive go on elsewhere; what was there is copied. False: there is no such. */
bool pc_tcp_redirect(struct pc_tcp *tcp, uint64_t handle, void *into, void *owner);
/* Give up a receive, or drop what was pushed: nothing is written there any more. */
void pc_tcp_give_up(struct pc_tcp *tcp, uint64_t handle);
/* Nobody wants what was offered. */
void pc_tcp_drop(struct pc_tcp *tcp, int peer, uint64_t id);
/* A buffered message of the peer was used. */
void pc_tcp_consumed(struct pc_tcp *tcp, int peer, size_t nbytes);

/* Do what can be done without waiting; whether that was something. */
bool pc_tcp_progress(struct pc_tcp *tcp);
bool pc_tcp_idle(struct pc_tcp *tcp);
/* A peer has ended: what was under way with it is gone, and nothing is told of it. */
void pc_tcp_forget(struct pc_tcp *tcp, int peer);
/* No link to the peer can be made. */
void pc_tcp_lose(struct pc_tcp *tcp, int peer, const char *why);
void pc_tcp_say_goodbye(struct pc_tcp *tcp);
/* After that: whether all that was written is in the memory of the peers' kernels. What comes is
   thrown away. */
bool pc_tcp_flush(struct pc_tcp *tcp);
/* Close every connection of this process, without a word: in a forked child, or at the end. */
void pc_tcp_close(struct pc_tcp *tcp);

/* tcp_write.c */
/* Have fragments of a send pulled, behind those of others; or not any more. */
void pc_tcp_activate(struct pc_tcp_peer *peer, struct pc_tcp_send *send);
void pc_tcp_deactivate(struct pc_tcp_peer *peer, struct pc_tcp_send *send);
void pc_tcp_tell(struct pc_tcp *tcp, int peer, enum pc_tcp_kind kind, uint64_t id, uint64_t value);
void pc_tcp_write(struct pc_tcp *tcp, int peer, int lane);
void pc_tcp_write_all(struct pc_tcp *tcp, int peer);
/* Write what peers have accepted. After what came along with that was told, and so answered: the
   answers would else stand behind the payloads, where a link is slow for long. */
void pc_tcp_write_granted(struct pc_tcp *tcp);
void pc_tcp_free_outs(struct pc_tcp *tcp, struct pc_tcp_out *first);
/* Watch a lane for room to write if it has something to write, and only then. */
void pc_tcp_watch_lane(struct pc_tcp *tcp, int peer, int lane);
void pc_tcp_end_send(struct pc_tcp *tcp, struct pc_tcp_send *send);
void pc_tcp_free_send(struct pc_tcp *tcp, struct pc_tcp_send *send);

/* tcp_read.c */
void pc_tcp_read(struct pc_tcp *tcp, int peer, int lane);
void pc_tcp_end_receive(struct pc_tcp *tcp, struct pc_tcp_receive *receive);
/* The receiver does not want it any more. */
void pc_tcp_dropped(struct pc_tcp *tcp, struct pc_tcp_send *send);
/* Say in words why a connection has ended. */
void pc_tcp_explain(int error, char *why, size_t room);
void pc_tcp_repay(struct pc_tcp *tcp, int peer, bool pushed, size_t nbytes);
/* A lane has come to its end, in good order or not. */
void pc_tcp_lane_ended(struct pc_tcp *tcp, int peer, int lane, const char *why);
#endif
