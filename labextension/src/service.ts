// Written by scripts/docs.py from fgpuspawner/service/objects.py. Do not edit.

export interface Banner {
  text: string;
  level: BannerLevel;
  until_at_s: number | null;
}

export type BannerLevel =
  | 'info'
  | 'warning';

export interface Gpu {
  uuid: string;
  model: string | null;
  fgpu: string;
  memory_mib: number;
  compute_percent: number | null;
  simulated: boolean;
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
  parks_at_s: number | null;
}

export interface Parked {
  since_s: number;
  memory_mib: number;
  wanted: boolean;
}

export interface Pull {
  text: string;
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

export interface Session {
  user: string;
  server_name: string;
  image: string;
  image_name: string;
  resource_group: string;
  amount: string;
  fgpu: string | null;
  gpu_memory_mib: number | null;
  message: string | null;
  display_name: string;
  mine: boolean;
  simulated: boolean;
  id: number;
  wait_text: string | null;
  position: number | null;
  expected_start_at_s: number | null;
  early_start_at_s: number | null;
  late_start_at_s: number | null;
  forecast_basis: string | null;
  pull: Pull | null;
  state: SessionState;
  cpu: string;
  memory_mib: number;
  compute_percent: number | null;
  gpus: Gpu[];
  ends_at_s: number | null;
  warning: string | null;
  can_keep: boolean;
  parked: Parked | null;
  can_park: boolean;
  park_refused: string | null;
  never_park: boolean | null;
  extend_by_s: number | null;
  url: string;
  pending_url: string;
  can_save: boolean;
  meter: Meter | null;
  resize: Resize | null;
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
