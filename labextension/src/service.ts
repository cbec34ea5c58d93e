// Written by scripts/docs.py from fgpuspawner/service/objects.py. Do not edit.

export interface Amounts {
  fgpu: string;
  cpu: string;
  memory_mib: number;
}

export interface Banner {
  text: string;
  level: BannerLevel;
  until_at_s: number | null;
}

export type BannerLevel =
  | 'info'
  | 'warning';

export interface Capacity {
  simulated: boolean;
  groups: Group[];
  mine_overall: Amounts;
  allocatable_overall: Amounts;
}

export type EndCause =
  | 'USER'
  | 'EXITED'
  | 'IDLE'
  | 'TIME_LIMIT'
  | 'QUEUE_TIMEOUT'
  | 'PREEMPTED'
  | 'NODE_LOST'
  | 'PULL_FAILED'
  | 'LAUNCH_FAILED'
  | 'OOM'
  | 'ISOLATION_FAILED'
  | 'DISK_LIMIT'
  | 'HUB_STOPPED';

export interface Gpu {
  uuid: string;
  model: string | null;
  fgpu: string;
  memory_mib: number;
  compute_percent: number | null;
  simulated: boolean;
}

export interface Group {
  name: string;
  nodes: number;
  nodes_lost: number;
  total: Amounts;
  used: Amounts;
  free: Amounts;
  mine: Amounts;
  allocatable: Amounts;
  largest_fgpu_now: string | null;
  fgpu_step: string;
  waiting: number;
  devices: SharedDevice[];
}

export interface HeldShare {
  fgpu: string;
  mine: boolean;
  session_id: number | null;
}

export interface Me {
  simulated: boolean;
  user: string | null;
  admin: boolean;
  administers: string[];
  server_name: string | null;
  groups: string[];
  banner: Banner | null;
}

export interface Meter {
  at_s: number;
  memory_used_mib: number | null;
  memory_limit_mib: number;
  sm_percent: number | null;
  compute_entitled_percent: number | null;
  compute_received_percent: number | null;
  trouble: string | null;
  compute_borrowed_percent: number | null;
  compute_lent_percent: number | null;
  memory_context_mib: number | null;
}

export interface OtherSession {
  id: number;
  user: string;
  server_name: string;
  mine: boolean;
}

export interface Parked {
  since_s: number;
  memory_mib: number;
  wanted: boolean;
}

export type Phase =
  | 'WAITING'
  | 'FETCHING'
  | 'UNPACKING'
  | 'COPYING'
  | 'AGAIN'
  | 'FAILED';

export interface Point {
  at_s: number;
  memory_used_mib: number | null;
  sm_percent: number | null;
}

export interface Pull {
  phase: Phase;
  text: string;
  layers_done: number;
  layers: number;
  bytes_done: number;
  bytes_total: number | null;
  seconds_left: number | null;
  attempt: number;
  trouble: string | null;
}

export interface Queue {
  simulated: boolean;
  group: string;
  length: number;
}

export interface Resize {
  why_not: string | null;
  amounts: string[];
  most_memory_mib: number | null;
  asked: string | null;
  state: ResizeState | null;
  message: string | null;
}

export type ResizeState =
  | 'ASKED'
  | 'DONE'
  | 'REFUSED';

export interface Saving {
  id: number;
  name: string;
  state: 'WISHED' | 'COMMITTING';
  message: string | null;
}

export interface Session {
  user: string;
  server_name: string;
  image: string;
  image_name: string;
  resource_group: string;
  amount: string;
  fgpu: string | null;
  gpu_memory_mib: number | null;
  submitted_at_s: number;
  started_at_s: number | null;
  ended_at_s: number | null;
  end_cause: EndCause | null;
  message: string | null;
  display_name: string;
  mine: boolean;
  simulated: boolean;
  id: number;
  gpu_models: string[];
  priority: number;
  wait_reason: WaitReason | null;
  wait_text: string | null;
  position: number | null;
  expected_start_at_s: number | null;
  early_start_at_s: number | null;
  late_start_at_s: number | null;
  forecast_basis: string | null;
  waits_for: WaitsFor | null;
  sooner: string | null;
  pull: Pull | null;
  state: SessionState;
  cpu: string;
  memory_mib: number;
  compute_percent: number | null;
  node: string | null;
  gpus: Gpu[];
  ahead: number | null;
  time_limit_s: number | null;
  ends_at_s: number | null;
  ends_cause: EndCause | null;
  warning: string | null;
  preemptible_from_s: number | null;
  can_keep: boolean;
  parked: Parked | null;
  can_park: boolean;
  extend_by_s: number | null;
  url: string;
  pending_url: string;
  saving: Saving | null;
  can_save: boolean;
  meter: Meter | null;
  disk: string | null;
  resize: Resize | null;
}

export interface SessionMeter {
  simulated: boolean;
  every_s: number;
  points: Point[];
}

export type SessionState =
  | 'PENDING'
  | 'SCHEDULED'
  | 'PREPARING'
  | 'PULLING'
  | 'RUNNING'
  | 'PARKED'
  | 'RESUMING'
  | 'TERMINATING'
  | 'TERMINATED'
  | 'ERROR'
  | 'CANCELLED';

export interface SharedDevice {
  uuid: string;
  index: number;
  model: string;
  memory_mib: number;
  fgpu_total: string;
  fgpu_used: string;
  simulated: boolean;
  cordoned: boolean;
  node: string;
  shares: HeldShare[];
}

export type WaitReason =
  | 'RESOURCES'
  | 'QUOTA'
  | 'PRIORITY'
  | 'RESERVED'
  | 'HELD'
  | 'CLUSTER';

export interface WaitsFor {
  count: number;
  fgpu: string;
  sessions: OtherSession[];
  text: string;
}
