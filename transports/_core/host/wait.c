#include "wait.h"

#include <sched.h>

/* Yields before the caller's lock is given up, so that a short wait does not pay for that. */
#define YIELDS_WITH_LOCK 16
/* Yields between looks at the clock and at the failure epoch. */
#define YIELDS_A_LOOK 32
/* A peer that is so late has something else to do: sleep. */
#define SLEEP_AFTER_NS 2000000u

static int sleep_once(pc_call *call, pc_flag64 *flag, uint64_t value, int peer,
                      uint64_t waited_ns) {
    pc_hold(call);
    int verdict = call->up->sleep(call, peer, waited_ns, false);
    if (verdict > 0 && pc_load(flag) < value)
        verdict = call->up->sleep(call, peer, waited_ns, true);
    if (verdict >= 0)
        pc_release(call);
    return verdict < 0 ? -1 : 0;
}

/* Note a wait, which was identified, where the launcher reads it. */
static struct pc_noted_wait *note(pc_host *host, const struct pc_noted_wait *wait) {
    struct pc_notes *notes = pc_host_notes(host);
    struct pc_noted_wait *noted = &notes->waits[atomic_fetch_add(&notes->num_waits, 1) % PC_NOTED];
    *noted = *wait;
    return noted;
}

/* It is over, if its note is not another's by now. */
static void note_end(struct pc_noted_wait *noted, const struct pc_noted_wait *wait,
                     uint64_t now_ns) {
    if (noted->since_ns == wait->since_ns && noted->ident == wait->ident)
        noted->until_ns = now_ns;
}

int pc_wait_long(pc_call *call, pc_flag64 *flag, uint64_t value, int peer) {
    struct pc_tally *tally = &pc_host_record(call->host, call->host->rank)->tally;
    struct pc_noted_wait wait = {0}, *noted = NULL;
    uint64_t started = 0;
    for (unsigned yields = 1;; yields++) {
        sched_yield();
        if (pc_load(flag) >= value) {
            if (started != 0) {
                uint64_t now = pc_now_ns();
                pc_tally_end(tally, now);
                note_end(noted, &wait, now);
            }
            return 0;
        }
        if (yields == YIELDS_WITH_LOCK) {
            call->up->identify(call, peer, &wait);
            pc_release(call);
        }
        if (yields % YIELDS_A_LOOK != 0)
            continue;
        uint64_t now = pc_now_ns();
        if (started == 0) {
            started = wait.since_ns = now;
            pc_tally_begin(tally, now);
            noted = note(call->host, &wait);
        }
        pc_deadline_count(call->deadline, now);
        if (now - started >= SLEEP_AFTER_NS || now >= call->deadline->until_ns ||
            pc_host_failed(call->host))
            break;
    }
    pc_hold(call);
    if (wait.nbytes == 0) { /* the lock was given up before */
        call->up->identify(call, peer, &wait);
        *noted = wait;
    }
    pc_host_sleep(call->host);
    int status = 0;
    while (status == 0 && pc_load(flag) < value)
        status = sleep_once(call, flag, value, peer, pc_now_ns() - started);
    pc_hold(call);
    pc_host_awake(call->host);
    pc_host_set_status(call->host, "", 0);
    if (status == 0 && call->up->sleep(call, -1, 0, false) < 0)
        status = -1;
    if (!pc_host_forked(call->host)) {
        uint64_t now = pc_now_ns();
        pc_tally_end(tally, now);
        note_end(noted, &wait, now);
    }
    return status;
}
