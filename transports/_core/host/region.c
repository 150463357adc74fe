/* How long a region is, and where its parts lie. See region.h. */
#include "region.h"

/* Eight chunks of 256 KiB a rank: what is written again has then left the other cores' second-level
   caches, from which it would come slowly. Measured on 2 cores, broadcast of 1 MiB: 29 us; with
   four chunks of 256 KiB 45, of 128 KiB 89. With many ranks chunks are smaller, so that a
   communicator's big slots take at most 8 MiB up to 64 ranks; but they hold a cache line for each
   rank, which is what a chunk is cut in at most. */
size_t pc_chunk_nbytes(int size) {
    size_t nbytes = ((size_t)8 << 20) / PC_CHUNKS / (size_t)size,
           least = pc_round_up((size_t)size * PC_LINE, PC_PAGE);
    if (nbytes > (size_t)256 << 10)
        nbytes = (size_t)256 << 10;
    nbytes = nbytes < (size_t)16 << 10 ? (size_t)16 << 10 : nbytes / PC_PAGE * PC_PAGE;
    return nbytes < least ? least : nbytes;
}

size_t pc_slots_offset(int size) {
    return pc_round_up((size_t)size * sizeof(struct pc_progress), PC_PAGE);
}
size_t pc_big_offset(int size) {
    return pc_round_up(pc_slots_offset(size) + (size_t)size * PC_SLOTS * sizeof(struct pc_slot),
                       PC_PAGE);
}
size_t pc_region_nbytes(int size) {
    return pc_big_offset(size) + (size_t)size * PC_CHUNKS * pc_chunk_nbytes(size);
}

size_t pc_largest_region_nbytes(int size) {
    size_t largest = 0;
    for (int ranks = 1; ranks <= size; ranks++)
        if (pc_region_nbytes(ranks) > largest)
            largest = pc_region_nbytes(ranks);
    return largest;
}
