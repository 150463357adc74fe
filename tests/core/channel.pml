/* A transfer and its ends, as a model: transports/_core/host/transfer.h, with the sleeping of host.h.

       spin -a channel.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m1000000

   One message, PIECES pieces. The sender looks at it for a while, helps, may hand a piece back, may take the
   message back, and then waits for the word that it is finished; the receiver copies, may give up or let the
   rest go elsewhere, and tells. Memory is modelled as who may write to it: the assertions say that nobody
   writes into memory that its owner has back, that a complete message has every piece, in the right place,
   that both sides agree on whether it was delivered, and that the sender always learns the end. */

#define PIECES 2
#define WAITING 1
#define TAKEN 2
#define DONE 3
#define WITHDRAWN 4

byte state = WAITING;
bool watched = true;
byte next = 0;
bool sealed = false, closed = true, taken_back = false; /* the marks in `next` */
byte done = 0;
byte returned = 0;
byte into = 0;             /* which memory pieces go to: 0 or 1 */

byte where[PIECES];        /* 0: nowhere; 1 + memory */
bool owned[2];             /* the receiver's user has it back: nobody may write */
bool finished_told = false; /* the item FINISHED, in the ring */
bool sender_asleep = false, doorbell = false;

bool sender_over = false, sender_delivered = false, sender_withdrawn = false;
bool receiver_over = false, receiver_complete = false;

#define MARKED (sealed || closed || taken_back)
#define SETTLED (done == next || (done + 1 == next && returned != 0))

inline tell() {
    finished_told = true;
    if
    :: sender_asleep -> doorbell = true
    :: else
    fi
}

proctype Sender() {
    byte piece, target;
    bool helps = true;
    /* looking */
    do
    :: atomic { state == DONE -> break }
    :: atomic { helps && !MARKED && next < PIECES -> piece = next; next++ };
       if
       :: target = into;
          assert(!owned[target]);
          where[piece] = target + 1;
          assert(!owned[target]);
          atomic { done++ }
       :: atomic { returned = piece + 1 }; helps = false
       fi
    :: break /* out of patience */
    od;
    watched = false;
    if
    :: state == DONE -> sender_delivered = true; goto over
    :: else
    fi;
    if
    :: skip
    :: if
       :: atomic { state == WAITING -> state = WITHDRAWN }; sender_withdrawn = true; goto over
       :: atomic { state != WAITING && !sealed -> taken_back = true }; sender_withdrawn = true
       :: atomic { state != WAITING && sealed -> skip } /* too late */
       fi
    fi;
    /* asleep until it is told */
    do
    :: finished_told -> break
    :: else ->
       sender_asleep = true;
       if
       :: finished_told
       :: else -> doorbell -> doorbell = false
       fi;
       sender_asleep = false
    od;
    if
    :: !sender_withdrawn && receiver_complete -> sender_delivered = true
    :: else
    fi;
over:
    sender_over = true
}

proctype Receiver() {
    byte piece, moved, here = 0;
    bool ok;
    atomic {
        if
        :: state == WAITING -> state = TAKEN; ok = true
        :: else -> ok = false
        fi
    };
    if
    :: !ok -> goto over
    :: else
    fi;
    into = 0;
    atomic {
        if
        :: taken_back -> ok = false
        :: else -> closed = false
        fi
    };
    if
    :: !ok -> goto given_up
    :: else
    fi;
    do
    :: atomic { !MARKED && next < PIECES -> piece = next; next++ };
       where[piece] = here + 1;
       atomic { done++ }
    :: atomic { returned != 0 -> piece = returned - 1; returned = 0 };
       where[piece] = here + 1;
       atomic { done++ }
    :: done == PIECES ->
       atomic {
           if
           :: taken_back -> ok = false
           :: else -> sealed = true
           fi
       };
       if
       :: !ok -> goto given_up
       :: else
       fi;
       moved = 0;
       do
       :: moved < PIECES -> assert(where[moved] == here + 1); moved++
       :: else -> break
       od;
       owned[here] = true;
       receiver_complete = true;
       state = DONE;
       if
       :: !watched -> tell()
       :: else
       fi;
       goto over
    :: taken_back -> goto given_up
    :: goto given_up
    :: here == 0 -> /* redirected */
       atomic { closed = true };
       SETTLED;
       if
       :: returned != 0 -> piece = returned - 1; returned = 0; where[piece] = 1; atomic { done++ }
       :: else
       fi;
       moved = 0;
       do
       :: moved < next -> assert(where[moved] == 1); where[moved] = 2; moved++
       :: else -> break
       od;
       owned[0] = true;
       here = 1;
       into = 1;
       atomic {
           if
           :: taken_back -> skip
           :: else -> closed = false
           fi
       }
    od;
given_up:
    atomic { closed = true };
    SETTLED;
    owned[0] = true;
    owned[1] = true;
    tell();
over:
    receiver_over = true
}

init {
    atomic { run Sender(); run Receiver() };
    sender_over && receiver_over;
    assert(!(sender_withdrawn && receiver_complete));
    assert(!sender_delivered || receiver_complete);
    assert(sender_withdrawn || sender_delivered == receiver_complete)
}
