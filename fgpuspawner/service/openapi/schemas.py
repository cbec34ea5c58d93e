"""The objects that the API answers with."""

from __future__ import annotations

from fgpu_scheduler import EndCause, ImageState, SessionState, WaitReason
from fgpuspawner.images.pull_state import Phase
from fgpuspawner.service.openapi.json_schema import (
    TEXT,
    Schema,
    by_name,
    kind,
    many,
    maybe,
    one_of,
    some_of,
    thing,
)

STATE = one_of(*(state.value for state in SessionState))
WAIT_REASON = maybe(one_of(*(reason.value for reason in WaitReason)))
END_CAUSE = maybe(one_of(*(cause.value for cause in EndCause)))
WAITS_FOR = maybe(
    thing(
        "count:count fgpu:amount text:text",
        sessions=many(thing("id:count user:text server_name:text mine:yes_no")),
    )
)
NEEDS = thing("fgpu:amount? gpu_memory_mib:count? cpu:amount? memory_mib:count?")
LEVEL = one_of("info", "warning")
ASKED = """
    user:text server_name:text image:text image_name:text resource_group:text amount:text fgpu:amount?
    gpu_memory_mib:count? submitted_at_s:at_s started_at_s:at_s? ended_at_s:at_s? message:text?
    mine:yes_no simulated:yes_no
"""
"""What a session and its receipt both say."""

SCHEMAS: dict[str, Schema] = {
    "error": thing(error=thing("code:text field:text? message:text")),
    "amounts": thing("fgpu:amount cpu:amount memory_mib:count"),
    "banner": thing("text:text until_at_s:at_s?", level=LEVEL),
    "me": thing(
        "user:text? admin:yes_no administers:text[] server_name:text? groups:text[] banner:banner? simulated:yes_no"
    ),
    "meter": thing(
        """
        at_s:at_s memory_used_mib:count? memory_limit_mib:count sm_percent:number?
        compute_entitled_percent:count? compute_received_percent:number? trouble:text?
        compute_borrowed_percent:number? compute_lent_percent:number? memory_context_mib:count?
        """
    ),
    "session": thing(
        f"""
        {ASKED} id:count display_name:text gpu_models:text[] cpu:amount memory_mib:count compute_percent:count?
        node:text? wait_text:text? position:count? ahead:count? expected_start_at_s:at_s? forecast_basis:text?
        early_start_at_s:at_s? late_start_at_s:at_s?
        time_limit_s:count? priority:whole ends_at_s:at_s? warning:text? preemptible_from_s:at_s?
        can_keep:yes_no extend_by_s:count? url:text pending_url:text can_save:yes_no meter:meter? disk:text?
        """,
        state=STATE,
        resize=maybe(
            thing(
                "why_not:text? amounts:amount[] most_memory_mib:count? asked:text? message:text?",
                state=maybe(one_of("ASKED", "DONE", "REFUSED")),
            )
        ),
        gpus=many(
            thing(
                "uuid:text model:text? fgpu:amount memory_mib:count compute_percent:count? simulated:yes_no"
            )
        ),
        wait_reason=WAIT_REASON,
        waits_for=WAITS_FOR,
        sooner=maybe(TEXT),
        pull=maybe(
            thing(
                """
                text:text layers_done:count layers:count bytes_done:count bytes_total:count?
                seconds_left:count? attempt:count trouble:text?
                """,
                phase=one_of(*(phase.value for phase in Phase)),
            )
        ),
        ends_cause=END_CAUSE,
        end_cause=END_CAUSE,
        saving=maybe(thing("id:count name:text message:text?", state=one_of("WISHED", "COMMITTING"))),
    ),
    "one_session": thing("session:session simulated:yes_no"),
    "sessions": thing("sessions:session[] simulated:yes_no"),
    "meters": thing("every_s:count simulated:yes_no", meters=by_name(kind("meter"))),
    "session_meter": thing(
        "now:meter? every_s:count simulated:yes_no",
        points=many(thing("at_s:at_s memory_used_mib:count? sm_percent:number?")),
        processes=many(thing("pid:count name:text? memory_mib:count?")),
    ),
    "receipt": thing(
        f"""
        {ASKED} session_id:count wait_s:count run_s:count gpu_hours:number memory_peak_mib:count?
        memory_p95_mib:count? sm_p95_percent:number? energy_wh:number? energy_estimated:yes_no samples:count
        compute_entitled_percent:count? compute_received_percent:number? compute_borrowed_percent:number?
        compute_lent_percent:number?
        """,
        end_cause=END_CAUSE,
    ),
    "one_receipt": thing("receipt:receipt simulated:yes_no"),
    "history": thing("receipts:receipt[] next:count? simulated:yes_no"),
    "advice": thing(
        "simulated:yes_no",
        advice=many(
            thing(
                """
                image:text image_name:text runs:count asked_fgpu:amount enough_fgpu:amount
                memory_peak_mib:count text:text
                """
            )
        ),
    ),
    "queue": thing(
        "group:text length:count simulated:yes_no",
        entries=many(
            thing(
                """
                position:count mine:yes_no id:count? user:text? amount:text fgpu:amount?
                expected_start_at_s:at_s? submitted_at_s:at_s
                early_start_at_s:at_s? late_start_at_s:at_s?
                """,
                state=STATE,
                wait_reason=WAIT_REASON,
            )
        ),
    ),
    "group": thing(
        """
        name:text nodes:count nodes_lost:count total:amounts used:amounts free:amounts
        mine:amounts allocatable:amounts largest_fgpu_now:amount? fgpu_step:amount waiting:count
        """,
        devices=many(
            thing(
                """
                uuid:text node:text index:count model:text memory_mib:count fgpu_total:amount
                fgpu_used:amount simulated:yes_no cordoned:yes_no
                """,
                shares=many(thing("fgpu:amount mine:yes_no session_id:count?")),
            )
        ),
    ),
    "capacity": some_of(
        "groups:group[] mine_overall:amounts allocatable_overall:amounts simulated:yes_no",
        # For administrators.
        nodes=many(thing("name:text group:text state:text isolation:text? reason:text?")),
    ),
    "forecast": thing(
        """
        starts_now:yes_no startable_now:count count:count position:count? expected_start_at_s:at_s? basis:text
        early_start_at_s:at_s? late_start_at_s:at_s?
        text:text largest_now:amount? soonest:amount? soonest_at_s:at_s? simulated:yes_no
        """,
        wait_reason=WAIT_REASON,
        waits_for=WAITS_FOR,
        beside_now=maybe(thing("cpu:amount memory_mib:count memory_gib:text")),
        beside_other=maybe(thing("cpu:amount memory_mib:count memory_gib:text")),
        refusals=many(thing("field:text code:text message:text limit:text? nearest:text?")),
        quota=maybe(thing("fgpu_left:amount? sessions_left:count? text:text?")),
    ),
    "images": thing(
        "simulated:yes_no",
        images=many(
            thing(
                """
                slug:text name:text framework:text version:text python:text description:text icon:text
                kernels:text[] gpu_architectures:text[] cuda:text? sudo:yes_no deprecated:text?
                private:yes_no default:yes_no
                """,
                minimum=NEEDS,
                recommended=NEEDS,
            )
        ),
    ),
    "private_image": thing(
        """
        id:count name:text owner:text mine:yes_no can_manage:yes_no message:text? session_id:count
        made_from:text base:text size_mib:count? shared_users:text[]? shared_groups:text[]? asked_by:text?
        asked_at_s:at_s made_at_s:at_s? has_recipe:yes_no accepted_by:text[]? declined_by:text[]? digest:text?
        answer:text? can_share:yes_no
        """,
        state=one_of(*(state.value for state in ImageState)),
    ),
    "one_private_image": thing("image:private_image? simulated:yes_no"),
    "private_images": thing(
        "images:private_image[] simulated:yes_no",
        quota=thing("images:count? mib:count? images_used:count mib_used:count"),
    ),
}
