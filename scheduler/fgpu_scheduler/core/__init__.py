"""The pure part: no clock, no randomness, no I/O, no ids of its own. The same values in, the same decision out.

Imports point down: forecast -> starts, planner -> passes -> ground, orders -> placer -> placement -> model -> units.
Read it in this order; each file says more at its top. A session holds its shares; what these come to is taken; a quota
counts it. A place is kept for who is first. Held is a request that nobody waits for, and nothing else.

The words
    units          an amount is thousandths of an fGPU; read, written and rounded here only
    parts          a mapping that is carried on: a change makes anew only what it touches
    model          the values of it all, frozen: `Snapshot` is everything that a decision may depend on
    lifecycle      every legal change of a session's state; all others raise
    records        what is kept of sessions beside the live ones

A request becomes shares
    shares         what a request is worth on given devices; the one place where amounts become shares
    placement      what is free, what fits, which fit is the best: the one search, of one node
    columns        the same of many nodes at once, as columns of numbers
    placer         the same for many requests, one after the other: what was found is kept
    scores         how good a fit is, one idea a file: what is left over, what is fragmented, what is asked for next
    asked          what was asked for lately, of which placement thinks ahead
    shortage       why nothing fits, in words

May it queue at all
    quota          what users, groups and all together may take, have waiting, and for how long
    admission      the limits on one request, and all reasons to refuse it; what could never start is never queued

Who is next
    policies       what an administrator decides of a resource group
    usage          what was used, and how it is forgotten
    orders         the order of a queue: first priority, then promises, then by arrival, by use or by dominant shares
    backfill       the place that is kept for the first of a queue, and who may start beside it
    releases       when what is held becomes free, by the ends that are known, and where a request fits soonest
    lanes          whom a pass need not try: who asks for the same as somebody ahead, or for no less than did not fit
    ground         nodes and what is free of them, carried from plan to plan
    passes         one pass over one queue: the heart. Plans and forecasts are made of nothing else
    planner        one decision for every waiting session
    commit         the sessions as a plan leaves them, once it is checked again that it holds

What is told
    lengths        how much longer a session runs, from those that ran at least as long
    hindsight      told against true: how good forecasts were, and how much wider they have to be
    starts         when each is expected to start: the planner's passes, run forward in several worlds
    forecast       position, range of the start and reason, of every queue
    request_forecast  the same of a request that is not submitted yet, and what would start now or sooner
    unblocking     whose end alone would start the first of a queue

What is taken back
    clearing       what is free of each node once others have ended, carried from round to round
    preempt        whose place sessions of higher priority take
    reclaim        warnings and ends: lifetime, idleness, priority
    extending      whether a time limit may be longer: where it delays nobody's promise
    resizing       another share for a running session: of what is free on its own GPU, and kept for nobody

What really happened
    reconcile      what is recorded against what the engines see, and what heals the difference

What would have happened
    replay         a history under another policy, by the same planner
"""
