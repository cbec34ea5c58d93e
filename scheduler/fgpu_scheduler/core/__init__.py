"""The pure part of the scheduler: no clock, no randomness and no I/O. Equal arguments give equal decisions.

A session *holds* shares from its placement to its end. A *held* request is one without a launcher that waits for it, for
example after a restart of the Hub: it keeps its queue position and is not started.

Read it in this order; each module says more at its top. Imports point down (`pyproject.toml` lists the layers).

Values
    units               amounts: thousandths of an fGPU; parsing, formatting and rounding
    model               the frozen values; `Snapshot` is everything that a decision may depend on
    lifecycle           every legal change of a session's state
    records             what is stored about sessions beside the live ones
    request_counts      how often which amounts were requested recently

From a request to shares
    shares              what a request is worth on given devices
    placement           free capacity, feasibility, and the best placement on one node
    placer              the same for many requests, one after the other
    scores              how good a placement is
    shortage            why nothing fits, in words

Admission
    quota               the limits of users, Hub groups and everyone together
    admission           the limits on one request, and every reason to refuse it

The queue
    policies            what an administrator configures for a resource group's queue
    accounts            the tree of accounts and users, and the order in which it is fair
    usage               past and present usage, and its decay
    orders              the order of a queue: priority, then age, then arrival, usage or dominant share
    reservations        the place that is reserved for a blocked request, and the known ends that free it
    pending_queue       sets of identical requests
    free_capacity       the free capacity of a resource group, kept from plan to plan
    group_scheduler     one pass over one queue; plans and forecasts consist of these passes
    returning           which parked sessions get their shares back, and the places of sessions on demand
    guarantees          the requests that come first, and the sessions that borrow
    planner             one decision for every waiting session, and the check before they are committed

Forecasts
    run_lengths         how long sessions run, learned from those that ended
    forecast_accuracy   how good earlier forecasts were, and the calibration of the next ones
    expected_starts     the planner's passes, run forward in several simulated worlds
    expected_returns    when parked sessions get the shares back that they want
    forecast            position, reason and range of the start of each waiting session
    request_forecast    the same for a request that is not submitted yet
    unblocking          which single end would start the first session of a queue

Running sessions
    preemption          which sessions end for requests of higher priority
    reclaim             warnings and ends: time limit, idleness, pre-emption
    extending           whether an owner may extend a time limit
    parking             which idle sessions are parked
    resizing            whether a running session may get another amount of its GPU
    reconcile           what differs between the records and the engines, and how to heal it

Simulation
    replay              a history of requests under another policy, by the same planner
"""
