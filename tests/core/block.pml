/* A buffered message and its ends, as a model: pc_filling in transports/_core/host/heap.h, with the sleeping
   of host.h.

       spin -a block.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m1000000

   MESSAGES messages of PIECES pieces go through one block, which is used again. The sender may offer its own
   memory first, and waits for that as long as it likes; then it fills the block, and tells after each piece.
   When its send is over it writes to its memory. The receiver takes what is offered or not, cannot copy it or
   can, reads the block while it is filled, and may lose patience at any time: then it sleeps until all of the
   block is there. The assertion says that it receives what was sent. */

#ifndef MESSAGES
#define MESSAGES 2
#endif
#define PIECES 2
#define GARBAGE 9

#define NO 0
#define OFFERED 1
#define TAKEN 2
#define COPIED 3

byte original[PIECES];     /* the sender's memory */
byte block[PIECES];
byte filled = 0;           /* pieces that are there */
byte direct = NO;
bool in_use = false;       /* the block: until its receiver gives it back */
byte published = 0;        /* items in the ring */
bool asleep = false, doorbell = false;

inline wake() {
    if
    :: asleep -> doorbell = true
    :: else
    fi
}

proctype Sender() {
    byte number = 0, piece;
    bool copied;
    do
    :: number < MESSAGES ->
       piece = 0;
       do
       :: piece < PIECES -> original[piece] = number + 1; piece++
       :: else -> break
       od;
       !in_use;
       in_use = true;
       filled = 0;
       if
       :: direct = OFFERED
       :: direct = NO
       fi;
       published++;
       wake();
       copied = false;
       if
       :: direct != NO ->
          do
          :: direct == COPIED -> break
          :: break /* out of patience */
          od;
#ifdef COUNT_TAKEN
          atomic { copied = (direct == COPIED || direct == TAKEN); direct = NO }
#else
          atomic { copied = (direct == COPIED); direct = NO }
#endif
       :: else
       fi;
       if
       :: copied
       :: else ->
          piece = 0;
          do
          :: piece < PIECES ->
#ifdef TELL_FIRST
             filled = piece + 1;
             block[piece] = original[piece];
#else
             block[piece] = original[piece];
             filled = piece + 1;
#endif
             piece++
          :: else -> break
          od;
#ifndef NO_WAKE
          wake()
#endif
       fi;
       piece = 0;
       do
       :: piece < PIECES -> original[piece] = GARBAGE; piece++
       :: else -> break
       od;
       number++
    :: else -> break
    od
}

proctype Receiver() {
    byte number = 0, copied;
    byte into[PIECES];
    bool there;
    do
    :: number < MESSAGES ->
       there = false;
       copied = 0;
       if
       :: published > number -> /* it looks at the next message, past the queues */
          if
          :: atomic { direct == OFFERED -> direct = TAKEN };
             do
             :: copied < PIECES -> into[copied] = original[copied]; copied++
             :: else -> break
             od;
             if
#ifdef BELIEVE_COPY
             :: there = true; direct = COPIED
#else
             :: atomic { direct == TAKEN -> direct = COPIED; there = true }
             :: direct != TAKEN
#endif
             :: atomic { direct == TAKEN -> direct = NO } /* it could not be copied */
             fi
          :: skip
          fi;
          copied = 0;
          do
          :: there -> break
          :: !there && copied < filled ->
             into[copied] = block[copied];
             copied++;
             there = (copied == PIECES)
          :: !there && copied >= filled -> break /* out of patience */
          od
       :: skip
       fi;
       if
       :: there
       :: else -> /* the usual way: only when all of it is there */
          do
          :: published > number && filled == PIECES -> break
          :: else ->
             asleep = true;
             if
             :: published > number && filled == PIECES
             :: else -> doorbell -> doorbell = false
             fi;
             asleep = false
          od;
          copied = 0;
#ifdef GIVE_BACK_FIRST
          in_use = false;
#endif
          do
          :: copied < PIECES -> into[copied] = block[copied]; copied++
          :: else -> break
          od
       fi;
       assert(into[0] == number + 1 && into[1] == number + 1);
       number++;
       in_use = false
    :: else -> break
    od
}

init {
    atomic { run Sender(); run Receiver() }
}
