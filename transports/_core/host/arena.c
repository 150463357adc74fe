#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Address space is plentiful and memory is not. So a block of each class of sizes stays one of that
   class, and nothing is ever merged: what is free and was touched is kept for the next of its
   class, up to `kept_most` bytes; what is more is given back to the kernel, the longest free
   first. */

#define MOST_NBYTES ((size_t)1 << 40)  /* of an arena */
#define ALL_NBYTES \
    ((size_t)32 << 40)  /* of all arenas of a host: a quarter of a process's address space */
#define KEPT_NBYTES ((size_t)256 << 20)

size_t pc_arena_nbytes(int size) {
    size_t nbytes = ALL_NBYTES / (size_t)size / PC_HUGE_PAGE * PC_HUGE_PAGE;
    return nbytes < MOST_NBYTES ? nbytes : MOST_NBYTES;
}

struct block {
    size_t offset, room; /* in the arena */
    size_t nbytes;       /* that are in use; 0: it is free */
    size_t touched;      /* bytes from its beginning that may take memory, and be other than zero */
    bool kept;           /* it is free, and so is in the list of those that were touched */
    struct block *next_free;
    struct block *newer, *older; /* of the free blocks that were touched */
    struct block *next;          /* of all */
};

struct pc_own_arena pc_own_arena;

#define CLASSES 256
#define LEAF_BITS 18 /* a leaf of the table is for a GiB */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static off_t file_offset;
static size_t top; /* everything from here on was never used */
static size_t kept_most;
static struct block *free_blocks[CLASSES], *all_blocks, *newest, *oldest;
static struct block **table[MOST_NBYTES >> (LEAF_BITS + 12)]; /* by page, where a block begins */
static struct pc_arena_use use;

struct window { /* another rank's arena */
    const pc_host *host; /* NULL: it is closed, and arrays lie here */
    int rank;
    bool is_lent;        /* arrays of this process lie here */
    unsigned char *memory;
    off_t offset;
    size_t nbytes;
    struct window *next;
};
static struct window *windows;

static bool is_copy;    /* this process is a fork's child: what arrays it had it has copied */
static bool is_retired; /* the process ends: what it frees others may still hold */

/* --- classes ---------------------------------------------------------------------------------- */

/* The class of blocks with room for `nbytes`, and that room: whole pages, at most a quarter more
   than asked for; from 2 MiB on whole large pages, which the kernel can use only if they lie on
   their borders in file and memory. */
static size_t class_of(size_t nbytes, size_t *room) {
    size_t pages = nbytes / PC_PAGE + (nbytes % PC_PAGE != 0), huge = PC_HUGE_PAGE / PC_PAGE;
    if (pages < 4) {
        pages += pages == 0;
        *room = pages * PC_PAGE;
        return pages;
    }
    size_t step = (size_t)1 << (61 - __builtin_clzll(pages));
    if (pages >= huge && step < huge)
        step = huge;
    pages = pc_round_up(pages, step);
    *room = pages * PC_PAGE;
    size_t bits = 63 - (size_t)__builtin_clzll(pages);
    return 4 * bits + (pages >> (bits - 2)) % 4;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static struct block **entry_of(size_t offset) {
    struct block ***leaf = &table[offset >> (LEAF_BITS + 12)];
    if (*leaf == NULL)
        /* of which only what is used takes memory */
        *leaf = calloc((size_t)1 << LEAF_BITS, sizeof **leaf);
    return *leaf != NULL ? &(*leaf)[offset / PC_PAGE & (((size_t)1 << LEAF_BITS) - 1)] : NULL;
}

static struct block *block_at(const void *memory) {
    return *entry_of((size_t)((const unsigned char *)memory - pc_own_arena.base));
}

static struct block *make(size_t room) {
    size_t align = room >= PC_HUGE_PAGE ? PC_HUGE_PAGE : PC_PAGE, offset = pc_round_up(top, align);
    if (offset > pc_own_arena.nbytes || room > pc_own_arena.nbytes - offset)
        return NULL;
    struct block **entry = entry_of(offset), *block = calloc(1, sizeof *block);
    if (entry == NULL || block == NULL) {
        free(block);
        return NULL;
    }
    block->offset = offset;
    block->room = room;
    block->next = all_blocks;
    *entry = all_blocks = block;
    top = offset + room;
    return block;
}

static void keep(struct block *block) {
    block->kept = true;
    block->newer = NULL;
    block->older = newest;
    *(newest != NULL ? &newest->newer : &oldest) = block;
    newest = block;
    use.kept_nbytes += block->touched;
}

static void keep_no_more(struct block *block) {
    block->kept = false;
    *(block->newer != NULL ? &block->newer->older : &newest) = block->older;
    *(block->older != NULL ? &block->older->newer : &oldest) = block->newer;
    use.kept_nbytes -= block->touched;
}

/* Give a block's memory back to the kernel; it reads as zero again. */
static void release(struct block *block) {
    off_t offset = file_offset + (off_t)block->offset;
    if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                  (off_t)block->touched) == 0)
        block->touched = 0;
}

void *pc_arena_alloc(size_t nbytes, bool zero) {
    size_t room, class;
    if (pc_own_arena.base == NULL || nbytes > pc_own_arena.nbytes)
        return NULL;
    class = class_of(nbytes, &room);
    pthread_mutex_lock(&lock);
    struct block *block = file >= 0 ? free_blocks[class] : NULL;
    if (block != NULL) {
        free_blocks[class] = block->next_free;
        if (block->kept)
            keep_no_more(block);
    } else if (file >= 0) {
        block = make(room);
    }
    size_t touched = 0;
    if (block != NULL) {
        touched = block->touched < nbytes ? block->touched : nbytes;
        block->nbytes = nbytes + (nbytes == 0);
        if (block->touched < block->nbytes)
            block->touched = pc_round_up(block->nbytes, PC_PAGE);
        use.blocks++;
        use.nbytes += block->nbytes;
    }
    pthread_mutex_unlock(&lock);
    if (block == NULL)
        return NULL;
    unsigned char *memory = pc_own_arena.base + block->offset;
    if (zero)
        memset(memory, 0, touched);
    return memory;
}

/* Of a fork's child: its memory is its own, and nothing is used again. */
static void free_copy(struct block *block) {
    madvise(pc_own_arena.base + block->offset, pc_round_up(block->nbytes, PC_PAGE), MADV_DONTNEED);
    block->nbytes = 0;
}

void pc_arena_retire(void) { is_retired = true; }

void pc_arena_free(void *memory) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(memory);
    use.blocks--;
    use.nbytes -= block->nbytes;
    if (file < 0) {
        free_copy(block);
    } else if (!is_retired) {
        size_t room, class = class_of(block->room, &room);
        block->nbytes = 0;
        block->next_free = free_blocks[class];
        free_blocks[class] = block;
        keep(block);
        while (use.kept_nbytes > kept_most && oldest != NULL) {
            struct block *given = oldest;
            keep_no_more(given);
            release(given);
        }
    }
    pthread_mutex_unlock(&lock);
}

size_t pc_arena_length(const void *memory) {
    pthread_mutex_lock(&lock);
    size_t nbytes = block_at(memory)->nbytes;
    pthread_mutex_unlock(&lock);
    return nbytes;
}

bool pc_arena_resize(void *memory, size_t nbytes) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(memory);
    bool fits = nbytes <= block->room && nbytes >= block->room / 2;
    if (fits) {
        nbytes += nbytes == 0;
        use.nbytes += nbytes - block->nbytes;
        block->nbytes = nbytes;
        if (nbytes > block->touched)
            block->touched = pc_round_up(nbytes, PC_PAGE);
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

struct pc_arena_use pc_arena_use(void) {
    pthread_mutex_lock(&lock);
    struct pc_arena_use now = use;
    pthread_mutex_unlock(&lock);
    return now;
}

/* --- forks ------------------------------------------------------------------------------------ */

/* A fork's child is to have its own copy of all arrays, as it has of other memory: neither sees
   what the other writes afterwards. The kernel does that only for private memory. So the child
   copies what is in use, before its parent, which waits for that, can write to it. (If the parent
   made its memory private instead, other threads of it could lose what they write meanwhile.) Only
   what was touched is copied. exec, vfork and posix_spawn call none of this. */
static int copied[2]; /* a pipe: the child has its copy */

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    copied[0] = copied[1] = -1;
    if (use.blocks > 0 && file >= 0 && pipe2(copied, O_CLOEXEC) < 0)
        copied[0] = copied[1] = -1; /* then the parent does not wait */
}

static void after_fork_in_parent(void) {
    char byte;
    if (copied[0] >= 0) {
        close(copied[1]);
        while (read(copied[0], &byte, 1) < 0 && errno == EINTR)
            ;
        close(copied[0]);
    }
    pthread_mutex_unlock(&lock);
}

static PC_COLD void no_copy(void) {
    static const char text[] =
        "pycoll: there is no memory for the copy of its arrays that a forked process needs\n";
    ssize_t ignored = write(2, text, sizeof text - 1);
    (void)ignored;
    _exit(1);
}

/* Copy what was touched of a block, where the file says that there is something. */
static void copy_block(const struct block *block, unsigned char *to) {
    off_t at = file_offset + (off_t)block->offset, end = at + (off_t)block->nbytes;
    while (at < end) {
        off_t begin = lseek(file, at, SEEK_DATA);
        if (begin < 0 || begin >= end)
            return;
        off_t stop = lseek(file, begin, SEEK_HOLE);
        at = stop > begin && stop < end ? stop : end;
        size_t offset = (size_t)(begin - file_offset);
        memcpy(to + offset, pc_own_arena.base + offset, (size_t)(at - begin));
    }
}

static void after_fork_in_child(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t end = 0;
    for (struct block *block = all_blocks; file >= 0 && block != NULL; block = block->next)
        if (block->nbytes > 0 && block->offset + block->nbytes > end)
            end = pc_round_up(block->offset + block->nbytes, PC_PAGE);
    if (end > 0) {
        unsigned char *own = mmap(NULL, end, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (own == MAP_FAILED)
            no_copy();
        for (struct block *block = all_blocks; block != NULL; block = block->next)
            if (block->nbytes > 0)
                copy_block(block, own);
        if (mremap(own, end, end, MREMAP_MAYMOVE | MREMAP_FIXED, pc_own_arena.base) == MAP_FAILED)
            no_copy();
    }
    /* What it may still read of other ranks' arrays it cannot change. */
    for (struct window *window = windows; file >= 0 && window != NULL; window = window->next)
        if (mmap(window->memory, window->nbytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, file, window->offset) == MAP_FAILED)
            munmap(window->memory, window->nbytes);
    if (copied[0] >= 0) {
        close(copied[0]);
        close(copied[1]); /* which wakes the parent */
    }
    if (file >= 0)
        close(file);
    file = -1; /* the child makes no arrays there, */
    pc_own_arena.shared_nbytes = 0; /* and those that it has nobody else has mapped */
    is_copy = true;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* --- mappings --------------------------------------------------------------------------------- */

/* On a large page's border in memory, as it is in the file. */
static unsigned char *map(int fd, off_t offset, size_t nbytes) {
    unsigned char *room = mmap(NULL, nbytes + PC_HUGE_PAGE, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return NULL;
    size_t before = -(uintptr_t)room % PC_HUGE_PAGE;
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
    unsigned char *memory = mmap(room + before, nbytes, PROT_READ | PROT_WRITE, flags, fd, offset);
    if (memory == MAP_FAILED) {
        munmap(room, nbytes + PC_HUGE_PAGE);
        return NULL;
    }
    if (before > 0)
        munmap(room, before);
    munmap(memory + nbytes, PC_HUGE_PAGE - before);
    madvise(memory, nbytes, MADV_DONTDUMP); /* a core file would touch every page of it */
    madvise(memory, nbytes, MADV_HUGEPAGE); /* where the system gives such to shared memory */
    return memory;
}

static bool is_file(int fd) {
    struct stat ours, theirs;
    return file >= 0 && fstat(file, &ours) == 0 && fstat(fd, &theirs) == 0 &&
           ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
}

/* Open the file of this host. A process that is in several worlds has arrays, and those of others,
   in one of their files only. Called with the lock. */
static int open_file(int fd, size_t file_nbytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (file >= 0)
        return is_file(fd) ? 0 : EXDEV;
    if (is_copy)
        return EINVAL;
    if (ftruncate(fd, (off_t)file_nbytes) < 0)
        return errno;
    pthread_once(&once, watch_forks);
    file = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* arrays outlive what was opened with `fd` */
    return file < 0 ? errno : 0;
}

static int open_arena(int fd, int rank, int size) {
    pc_host host;
    memset(&host, 0, sizeof host);
    pc_host_lay_out(&host, size);
    int error = open_file(fd, host.file_nbytes);
    if (error != 0)
        return error;
    size_t header_nbytes = host.rings_offset;
    host.base = mmap(NULL, header_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (host.base == MAP_FAILED)
        return errno;
    file_offset = (off_t)(host.arenas_offset + (size_t)rank * host.arena_nbytes);
    unsigned char *base = map(file, file_offset, host.arena_nbytes);
    if (base != NULL) {
        size_t physical = (size_t)sysconf(_SC_PHYS_PAGES) * PC_PAGE / 16 / (size_t)size;
        kept_most = physical < KEPT_NBYTES ? physical : KEPT_NBYTES;
        /* if this process is not the first of its rank, the arena is another's */
        uint64_t none = 0;
        if (atomic_compare_exchange_strong(&pc_host_record(&host, rank)->arena, &none,
                                           (uint64_t)(uintptr_t)base)) {
            pc_own_arena.nbytes = pc_own_arena.shared_nbytes = host.arena_nbytes;
            pc_own_arena.base = base;
        } else {
            munmap(base, host.arena_nbytes);
            error = EBUSY;
        }
    } else {
        error = ENOMEM;
    }
    munmap(host.base, header_nbytes);
    return error;
}

int pc_arena_open(int fd, int rank, int size) {
    if (pc_forks != 0 || is_copy)
        return EINVAL;
    pthread_mutex_lock(&lock);
    int error = pc_own_arena.base != NULL ? 0 : open_arena(fd, rank, size);
    pthread_mutex_unlock(&lock);
    return error;
}

static const pc_host *joined; /* NULL: none yet, or no more */
static bool is_wanted;

void pc_arena_want(void) {
    is_wanted = true;
    if (joined != NULL)
        /* or arrays lie in ordinary memory */
        pc_arena_open(joined->fd, joined->rank, joined->size);
}

/* Forget the arenas of other ranks of a host that closes, but for arrays that lie there. The next
   host may have the file's place if nothing is left. */
static void leave(const pc_host *host) {
    pthread_mutex_lock(&lock);
    for (struct window **at = &windows, *window; (window = *at) != NULL;) {
        bool is_over = window->host == host && !window->is_lent;
        if (window->host == host)
            window->host = NULL;
        if (!is_over) {
            at = &window->next;
            continue;
        }
        munmap(window->memory, window->nbytes);
        *at = window->next;
        free(window);
    }
    if (windows == NULL && pc_own_arena.base == NULL && is_file(host->fd)) {
        close(file);
        file = -1;
    }
    pthread_mutex_unlock(&lock);
}

void pc_arena_host(const pc_host *host, bool here) {
    /* the parent has told where its arena is, but it is the child that joins */
    if (here && is_copy)
        atomic_store(&pc_host_record((pc_host *)host, host->rank)->arena, 0);
    if (here && joined == NULL)
        joined = host;
    if (here && is_wanted)
        pc_arena_want();
    if (!here && joined == host)
        joined = NULL;
    if (!here)
        leave(host);
}

bool pc_window_open(pc_host *host, int rank) {
    pthread_mutex_lock(&lock);
    struct window *window = NULL;
    if (host->windows[rank] != NULL) {
        pthread_mutex_unlock(&lock);
        return true;
    }
    if (open_file(host->fd, host->file_nbytes) == 0 &&
        (window = calloc(1, sizeof *window)) != NULL) {
        window->host = host;
        window->rank = rank;
        window->offset = (off_t)(host->arenas_offset + (size_t)rank * host->arena_nbytes);
        window->nbytes = host->arena_nbytes;
        window->memory = map(file, window->offset, window->nbytes);
        if (window->memory == NULL) {
            free(window);
            window = NULL;
        }
    }
    if (window != NULL) {
        window->next = windows;
        windows = window;
        host->windows[rank] = window->memory;
    }
    pthread_mutex_unlock(&lock);
    return window != NULL;
}

void pc_window_lend(const pc_host *host, int rank) {
    pthread_mutex_lock(&lock);
    for (struct window *window = windows; window != NULL; window = window->next)
        if (window->host == host && window->rank == rank)
            window->is_lent = true;
    pthread_mutex_unlock(&lock);
}
