/* The machine below the fake driver: calls.c, memory.c, streams.c. The driver's functions over it
 * are in api_*.c, what tests may ask for beyond them in extras.c. One mutex guards it: enter()
 * locks. */
#ifndef FAKE_CUDA_MACHINE_H
#define FAKE_CUDA_MACHINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
};

enum { HOST_MEMORY_TYPE = 1, DEVICE_MEMORY_TYPE = 2, UNIFIED_MEMORY_TYPE = 4 };

#define DEVICES 16
#define DEVICE_MEMORY ((size_t)16 << 30)
#define FRESH 0xA5  /* what memory that nobody has written holds */
#define UNDONE 0xDB /* what the destination of a copy holds until the copy has run */

/* Something that is waited for: `pending` streams have still to come to it. */
struct mark {
    int refs, pending;
};

/* Where a copy reads or writes. What is there is looked up when the copy is enqueued, and must
 * still be there when it runs: `owner` is the id of an allocation or a registration, 0 of neither.
 */
struct side {
    uintptr_t address;
    size_t pitch; /* bytes from a row to the next */
    bool device;
    uint64_t owner;
};

enum kind { COPY, SET, RECORD, WAIT, ALLOCATE, FREE, KERNEL };

struct kernel;

struct op {
    struct op *next;
    enum kind kind;
    bool poisoned;
    struct side to, from;
    size_t width, rows;
    uint32_t value;    /* SET */
    size_t value_size; /* SET: 1 or 4 bytes */
    struct mark *mark; /* RECORD, WAIT */
    uint64_t id;       /* ALLOCATE, FREE: of the allocation */
    const struct kernel *kernel; /* KERNEL, and its arguments */
    uint64_t *arguments;
    size_t num_words;
};

struct context;

struct stream {
    struct stream *next;
    uint64_t handle; /* 0: a default stream, which is never destroyed */
    struct context *context;
    struct op *head, *tail;
    bool destroyed; /* goes when its queue is empty */
    bool captured;  /* into a graph: what asks or waits is not permitted */
};

struct context {
    int device, refs;
    CUresult error; /* sticky, once a copy went wrong */
    struct stream *legacy;
};

struct event {
    struct event *next;
    uint64_t handle;
    struct context *context;
    struct mark *mark; /* of the last record */
};

/* In the last page of an allocation's memfd, for the processes that have opened it. */
struct control {
    _Atomic int alive;
};

struct allocation {
    struct allocation *next;
    uint64_t id;    /* unique in this process */
    uint64_t nonce; /* unique on this machine */
    CUdeviceptr base;
    size_t size;
    char *bytes; /* where the host may touch what the device has at `base` */
    void *area;
    size_t area_size;
    struct control *control;
    struct context *context;
    int fd;
    bool pool;  /* it comes from a pool of cuMemAllocAsync: */
    bool ready; /* its stream has come to that, */
    bool freed; /* cuMemFreeAsync is enqueued */
    bool imported;
    int opened; /* times, of an imported one */
};

struct registration {
    struct registration *next;
    uint64_t id;
    uintptr_t base;
    size_t size;
    struct context *context;
};

struct counts {
    uint64_t enqueued, run, h2d, d2h, d2d, set, pageable, illegal, contextless, flushes, kernels;
};

extern struct context contexts[DEVICES];
extern int device_count, physical[DEVICES];
extern bool initialized, tracing;
extern struct allocation *allocations;
extern struct registration *registrations;
extern struct stream *streams;
extern struct event *events;
extern struct counts counts;
extern int waiting; /* threads that wait for what is held */

/* A call of the driver: enter() at its beginning, leave() at its end, also if enter() refused. */
enum needs { NOTHING, DRIVER, CONTEXT };
struct call {
    const char *name;
    bool locked;
    char text[200];
};
CUresult enter(struct call *call, const char *name, enum needs needs, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
CUresult leave(struct call *call, CUresult result);
void lock(void);
void unlock(void);
void notify(void);                                  /* who waits for a change */
bool wait_for_change(const struct timespec *until); /* false: it did not come in time */
bool set_failures(const char *text);
void set_seed(uint64_t seed);
unsigned random_below(unsigned n);

/* The contexts that are current in this thread. */
struct context *current_context(void);
bool push_context(struct context *context);
struct context *pop_context(void);
struct context *context_of(const void *handle); /* NULL if it is none */
void destroy_context(struct context *context);

int attribute(int number); /* of every device */
bool set_attribute(int number, int value);

uint64_t new_id(void);
uint64_t new_handle(void); /* not an address, and never used again */

/* Memory. */
struct allocation *allocate(struct context *context, size_t size);
struct allocation *import_allocation(struct context *context, int pid, int fd, uint64_t nonce,
                                     size_t size);
void release(struct allocation *allocation);
struct allocation *allocation_at(uintptr_t address); /* the one that this lies in */
struct allocation *allocation_with(uint64_t id);
struct registration *registration_at(uintptr_t address, size_t size); /* some that it overlaps */
struct registration *add_registration(struct context *context, uintptr_t base, size_t size);
void remove_registration(struct registration *registration);

void drop_hidden(void); /* what network devices have written, and nobody has flushed */

/* Streams. */
struct stream *find_stream(const void *handle); /* NULL: INVALID_HANDLE */
struct stream *new_stream(struct context *context, uint64_t handle);
void drop_empty(struct stream *stream);
struct event *find_event(const void *handle);
void remove_event(struct event *event);
struct mark *new_mark(int pending);
void drop_mark(struct mark *mark);
void enqueue(struct stream *stream, struct op op);
CUresult enqueue_copy(struct stream *stream, struct op op);
bool run_one(void);
CUresult wait_for(struct mark *mark, struct context *context);
uint64_t hold(struct stream *stream);
bool unhold(uint64_t id);
void unhold_all(void);
void drop_queues(struct context *context);
void run_kernel(struct context *context, struct op *op);

CUresult find_function(const char *name, void **function, int version, int *status);

#endif
