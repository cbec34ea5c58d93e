"""The API's JSON objects (docs/rest-api.md), built from one consistent reading of the store. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from fgpu_scheduler import (
    ASKED_FOR_S,
    LAUNCHING,
    UP,
    BlockingSessions,
    EndCause,
    ImageState,
    Request,
    Session,
    SessionState,
    Share,
    compute_of,
    format_milli,
    lifetime_s,
    not_extended,
    preemptible_from_s,
    wants_shares,
)
from fgpuspawner.service import objects
from fgpuspawner.service.model import (
    Site,
    Viewer,
    World,
    extension_of,
    groups_of,
    is_mine,
    is_simulated,
    is_visible,
    may_save,
    meter_of,
    never_park,
    resize_object,
    session_label,
    share_is_simulated,
    why_not_parked,
)
from fgpuspawner.text.sessions import (
    WITHDRAWN,
    ahead_words,
    amount_words,
    fgpu_of,
    isolated,
    session_name,
    warning_words,
)

IN_PROGRESS = (ImageState.WISHED, ImageState.COMMITTING)
"""States of a private image that is being saved."""
MAX_NAMED = 3


def asked_fields(session: Session, world: World, viewer: Viewer, site: Site) -> dict[str, object]:
    """Return the fields that a session and its receipt share, except those read from the session and its request."""
    asked = session.request
    shares = session.placement.shares if session.placement else ()
    return {
        "image_name": site.image_names.get(asked.image, asked.image),
        "display_name": session_name(asked),
        "amount": amount_words(asked),
        "fgpu": fgpu_of(session),
        "gpu_memory_mib": sum(s.memory_mib for s in shares) if shares else None,
        "mine": is_mine(session, viewer),
        "simulated": is_simulated(session, world),
    }


def session_object(session: Session, world: World, viewer: Viewer, site: Site) -> objects.Session:
    """Return one session. The viewer must be allowed to see it."""
    asked, live = session.request, meter_of(session, world)
    shares, waits = (
        session.placement.shares if session.placement else (),
        session.state is SessionState.PENDING,
    )
    server = "/".join(quote(part, safe="@~") for part in (asked.user, asked.server_name) if part)
    return objects.Session.of(
        session,
        asked,
        **asked_fields(session, world, viewer, site),
        **_wait_fields(session, world, viewer),
        **_end_fields(session, world),
        compute_percent=compute_of(shares),
        node=session.placement.node_id if session.placement else None,
        gpus=[_gpu_object(share, world) for share in shares],
        pull=_pull(session, world),
        message=session.message or (None if site.is_offered(asked) or not waits else WITHDRAWN),
        url=f"{site.base_url}user/{server}/",
        pending_url=f"{site.base_url}hub/spawn-pending/{server}",
        saving=next(
            (i for i in world.private if i.session_id == session.id and i.state in IN_PROGRESS), None
        ),
        can_save=may_save(session, world, viewer),
        meter=live.now if live else None,
        disk=_disk(session, world, viewer),
        folders=_folders(asked, site),
        resize=resize_object(session, world),
        parked=_parked(session),
        can_park=why_not_parked(session, world) is None,
        park_refused=_park_refused(session, world),
        never_park=never_park(session, world),
    )


def _disk(session: Session, world: World, viewer: Viewer) -> str | None:
    # It names folders: only for the session's owner and administrators.
    may = session.state in UP and (is_mine(session, viewer) or viewer.admin)
    return world.disks.get(session.id) if may else None


def _folders(asked: Request, site: Site) -> list[objects.SessionFolder]:
    known = {folder.name: objects.SessionFolder.of(folder) for folder in site.folders_of(asked)}
    gone = [objects.SessionFolder(name=name) for name in asked.folders if name not in known]
    return [*known.values(), *gone]


def _parked(session: Session) -> dict[str, object] | None:
    if session.state is not SessionState.PARKED:
        return None
    wanted = session.wanted_at_s is not None
    return {"since_s": session.parked_at_s, "memory_mib": session.parked_mib, "wanted": wanted}


def _park_refused(session: Session, world: World) -> str | None:
    """Return why it was not parked when a person asked for it, for as long as that wish would have stood."""
    asked_at_s = session.park_asked_at_s
    recent = asked_at_s is not None and world.snapshot.now_s < asked_at_s + ASKED_FOR_S
    return session.park_refused if recent and session.state in UP else None


def _wait_fields(session: Session, world: World, viewer: Viewer) -> dict[str, object]:
    if session.state is not SessionState.PENDING and not wants_shares(session):
        return {"wait_reason": None}
    found = world.forecasts.get(session.id) or world.wanted.get(session.id)
    sooner = sooner_words(session, world, viewer) or None
    if found is None:
        return {"sooner": sooner}
    return {
        "wait_reason": found.reason,
        "wait_text": found.text,
        "position": found.position,
        "ahead": max(0, found.position - 1),
        "expected_start_at_s": found.expected_start_at_s,
        "early_start_at_s": found.early_at_s,
        "late_start_at_s": found.late_at_s,
        "forecast_basis": found.basis,
        "waits_for": waits_for(found.ahead, world, viewer),
        "sooner": sooner,
    }


def waits_for(ahead: BlockingSessions | None, world: World, viewer: Viewer) -> objects.WaitsFor | None:
    """Return the sessions that must end before this one starts. Only those that the viewer may know of are listed."""
    found = [world.session(i) for i in ahead.ids] if ahead else []
    known = [s for s in found if s is not None and is_visible(s, viewer)]
    text = ahead_words(ahead, [session_label(s, viewer) for s in known])
    if ahead is None or text is None:
        return None
    listed = [objects.OtherSession.of(s, s.request, mine=is_mine(s, viewer)) for s in known]
    return objects.WaitsFor.of(ahead, count=ahead.sessions, sessions=listed, text=text)


def start_words(session: Session, world: World, viewer: Viewer) -> tuple[str, str]:
    """Return the ends with which a session starts, and the single ends that would start it at once, or empty texts."""
    expected = world.forecasts.get(session.id)
    waits = waits_for(expected.ahead if expected else None, world, viewer)
    sooner = sooner_words(session, world, viewer)
    if waits is not None:
        return waits.text, sooner
    found = world.unblockings.get(session.request.resource_group)
    if found is None or found.head_id != session.id:
        return "", ""
    if found.by_itself:
        return "starts as soon as a session that is ending has ended", ""
    if found.never:
        return "can't start yet" + (f": {isolated(expected.text)}" if expected else ""), ""
    if sooner:
        return sooner, ""
    if found.untried:
        return "waits for larger sessions, or for more than one, to end", ""
    return "starts only when more than one session has ended", ""


def sooner_words(head: Session, world: World, viewer: Viewer) -> str:
    """Return the single ends that would start the first of a queue sooner than expected; empty for all others."""
    found, forecast = world.unblockings.get(head.request.resource_group), world.forecasts.get(head.id)
    if found is None or found.head_id != head.id:
        return ""
    expected = forecast.ahead.ids if forecast is not None and forecast.ahead is not None else ()
    ends = [s for i in found.ids if (s := world.session(i)) is not None and (i,) != expected]
    if not ends:
        return ""
    # The viewer's own first: these they can end themselves.
    ends.sort(key=lambda s: not is_mine(s, viewer))
    told = [_ending_words(s, world, viewer) for s in ends[:MAX_NAMED]]
    others = len(ends) - len(told)
    if others:
        told.append("another one" if others == 1 else f"one of {others} others")
    which = "this" if len(ends) == 1 else "one of these"
    return f"starts at once if {which} ends: {', or '.join(told)}"


def _ending_words(session: Session, world: World, viewer: Viewer) -> str:
    shares = session.placement.shares if session.placement else ()
    places = [f"GPU {d.index} of {d.node_id}" for s in shares if (d := world.devices.get(s.device_uuid))]
    where = f" on {', '.join(places[:MAX_NAMED])}" if places else ""
    holds = f"{format_milli(sum(s.fgpu_milli for s in shares))} fGPU{where}"
    return (
        f"{session_label(session, viewer)} ({holds})"
        if is_visible(session, viewer)
        else f"a session with {holds}"
    )


def _pull(session: Session, world: World) -> dict[str, object] | None:
    state = world.pulls.get(session.id)
    starts = session.state in (SessionState.PENDING, SessionState.SCHEDULED, *LAUNCHING)
    return state.as_json() if state is not None and starts else None


def _end_fields(session: Session, world: World) -> dict[str, object]:
    if session.state not in UP:
        return {"ends_at_s": None, "ends_cause": None}
    allowed = extension_of(session, world)
    rules = world.rules.of(session.request.resource_group)
    at_s, cause = session.ends_at_s, session.ends_cause
    limit_s = lifetime_s(session, rules, world.ledger)
    if at_s is None and limit_s is not None and session.started_at_s is not None:
        at_s, cause = session.started_at_s + limit_s, EndCause.TIME_LIMIT
    return {
        "ends_at_s": at_s,
        "ends_cause": cause,
        "warning": warning_words(session),
        "preemptible_from_s": preemptible_from_s(session, rules) if rules.preempt else None,
        "can_keep": cause is EndCause.IDLE,
        "extend_by_s": allowed.by_s if not_extended(session, allowed) is None else None,
    }


def _gpu_object(share: Share, world: World) -> objects.Gpu:
    device = world.devices.get(share.device_uuid)
    return objects.Gpu.of(
        share,
        uuid=share.device_uuid,
        model=device.model if device else None,
        compute_percent=compute_of((share,)),
        simulated=share_is_simulated(share, world),
    )


def sessions_object(
    sessions: Iterable[Session], world: World, viewer: Viewer, site: Site
) -> objects.Sessions:
    """Return a list of sessions. The viewer must be allowed to see each."""
    shown = [session_object(s, world, viewer, site) for s in sessions]
    simulated = world.simulated(groups_of(viewer, world)) or any(s.simulated for s in shown)
    return objects.Sessions(sessions=shown, simulated=simulated)
