/**
 * The payload of `GET fgpu/api/status` (jupyterlab_fgpu/status.py) and the model's token.
 * Memory is in MiB, instants (`_at_s`) are UTC seconds; null is "not known", never zero.
 */
import type { VDomRenderer } from '@jupyterlab/ui-components';
import { Token } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';

export interface IGpu {
  uuid: string;
  model: string | null;
  fgpu: string | null;
  memory_mib: number | null;
  compute_percent: number | null;
  simulated: boolean;
}

/** What was measured of a running session; null is "not known", and `trouble` says why. */
export interface IMeter {
  at_s: number | null;
  memory_used_mib: number | null;
  memory_limit_mib: number | null;
  /** Of what is used: for contexts and code, not the program's; null where that is not known. */
  memory_context_mib: number | null;
  /** Of the whole GPU, by this session. */
  sm_percent: number | null;
  compute_entitled_percent: number | null;
  /** Of the whole GPU, over the last minute. */
  compute_received_percent: number | null;
  /** Of that, what was lent by others; null where compute is not lent. */
  compute_borrowed_percent: number | null;
  /** What others had of this session's share. */
  compute_lent_percent: number | null;
  trouble: string | null;
}

/** What a running session's slice may become, and the last wish for it. */
export interface IResize {
  /** Why it keeps its slice, whatever is asked for. */
  why_not: string | null;
  /** In fGPU, ascending, with what it has; empty for a session of exact amounts. */
  amounts: string[];
  /** What is free for a session of exact amounts, with what it has; null for one of fGPU. */
  most_memory_mib: number | null;
  asked: string | null;
  state: 'ASKED' | 'DONE' | 'REFUSED' | null;
  message: string | null;
}

/** Another amount for a session, in the terms that it was asked for in. */
export type Wanted =
  | { fgpu: string }
  | { gpu_memory_mib: number; compute_percent?: number };

export interface ISession {
  id: number | null;
  server_name: string;
  display_name: string;
  state: string;
  image: string | null;
  image_name: string | null;
  resource_group: string | null;
  /** What was asked for of a GPU, in words: "0.5 fGPU", "5 GiB + 25 %". */
  amount: string | null;
  fgpu: string | null;
  gpu_memory_mib: number | null;
  compute_percent: number | null;
  gpus: IGpu[];
  wait_reason: string | null;
  wait_text: string | null;
  position: number | null;
  ahead: number | null;
  expected_start_at_s: number | null;
  /** Of ten starts eight lie from then ... */
  early_start_at_s: number | null;
  /** ... to then. */
  late_start_at_s: number | null;
  forecast_basis: string | null;
  /** How far its image is, in words, while it is fetched. */
  pull_text: string | null;
  message: string | null;
  /** What was last measured of it on its machine. */
  meter: IMeter | null;
  /** Null of one that does not run. */
  resize: IResize | null;
  started_at_s: number | null;
  /** Why it is about to be ended, in words; `ends_at_s` is when. */
  warning: string | null;
  ends_at_s: number | null;
  can_keep: boolean;
  /** By how much its time limit could be extended now; null: not at all. */
  extend_by_s: number | null;
  can_save: boolean;
  url: string | null;
  pending_url: string | null;
  simulated: boolean;
}

export interface IThisSession extends ISession {
  source: 'service' | 'environment';
  gpu_memory_used_mib: number | null;
  gpu_memory_used_reason: string | null;
}

/** An administrator's message to all. */
export interface IBanner {
  text: string;
  level: string;
  until_at_s: number | null;
}

/** One resource: what is mine, of that and what I could still get; in my resource group and overall. */
export interface IBarRow {
  kind: 'fgpu' | 'cpu' | 'memory_mib';
  mine: string;
  total: string;
  percent: number;
  mine_overall: string;
  total_overall: string;
  percent_overall: number;
}

/** A process of this session that holds GPU memory; `notebook` is the path of the one whose kernel it is of. */
export interface IProcess {
  pid: number;
  name: string | null;
  memory_mib: number | null;
  notebook: string | null;
}

/** What only an open panel asks for. */
export interface IDetails {
  history: {
    every_s: number | null;
    points: {
      at_s: number;
      memory_used_mib: number | null;
      sm_percent: number | null;
    }[];
  } | null;
  processes: IProcess[];
  advice: string | null;
}

/** What an out-of-memory error comes of, and what would help (`GET fgpu/api/explain`). */
export interface IExplanation {
  limit_mib: number | null;
  used_mib: number | null;
  tried_mib: number | null;
  processes: IProcess[];
  larger: {
    amount: string;
    gpu_memory_mib: number;
    options: Record<string, string>;
    /** This session can have it now, and its programs run on. */
    in_place: boolean;
    starts_now: boolean;
    text: string | null;
  } | null;
}

/** One thing that fgpu-verify tried. */
export interface IProofCheck {
  name: string;
  what: string;
  state: 'held' | 'failed' | 'bypassed' | 'not tried';
  text: string;
}

/** The last run of fgpu-verify (`fgpu/api/proof`). */
export interface IProof {
  state: 'none' | 'running' | 'held' | 'failed' | 'unknown';
  at_s: number | null;
  checks: IProofCheck[];
  problem: string | null;
}

export interface IStatus {
  hub: 'ok' | 'absent' | 'unreachable' | 'forbidden';
  hub_message: string | null;
  /** Age of what the service said, in seconds, when this answer was made. */
  as_of_s: number | null;
  session: IThisSession | null;
  others: ISession[];
  queue: {
    group: string | null;
    length: number | null;
    reason: string | null;
  };
  /** Whose sessions these are. */
  user: string | null;
  banner: IBanner | null;
  bars: { group: string; rows: IBarRow[] } | null;
  simulated: boolean;
  details?: IDetails;
}

/** What this tab knows: the last payload, and what is wrong with the Jupyter server if anything. */
export interface IReading {
  status: IStatus | null;
  /** When `status` came, in milliseconds of this browser's clock. */
  receivedAt: number;
  /**
   * - `loading`: nothing came yet
   * - `ok`: `status` is current
   * - `missing`: the server has no extension (404)
   * - `offline`: the server does not answer; `status` is what it said last
   */
  server: 'loading' | 'ok' | 'missing' | 'offline';
}

/** The one poller of a tab; every widget renders from it. */
export interface IFGPUModel extends VDomRenderer.IModel {
  readonly reading: IReading;
  /** Emits each good status of the service. */
  readonly told: ISignal<IFGPUModel, IStatus>;
  /** Say that details are looked at from now on, or no longer: they are asked for only then. */
  watchDetails(on: boolean): void;
  /** Seconds between two refreshes. */
  refreshPeriodS: number;
  /** Ask now, instead of at the next period. */
  refresh(): Promise<void>;
  /** The session has ended: ask once each time that the tab is shown again, until its server answers. */
  rest(): void;
  /** End or cancel a session of the user; rejects with a message to show. */
  stop(id: number): Promise<void>;
  /** Keep an idle session that is about to be ended; rejects with a message to show. */
  keep(id: number): Promise<void>;
  /** Make the time limit of a session longer; rejects with a message to show. */
  extend(id: number): Promise<void>;
  /** Give a session another amount of its GPU, and return it; rejects with a message to show where it keeps what it had. */
  resize(id: number, wanted: Wanted): Promise<ISession>;
  /** Ask what fgpu-verify has found, or have it begin; rejects with a message to show. */
  proof(begin: boolean): Promise<IProof>;
  /** Ask what an out-of-memory error comes of; rejects with a message to show. */
  explain(triedMib: number | null): Promise<IExplanation>;
}

export const IFGPUModel = new Token<IFGPUModel>(
  'jupyterlab-fgpu:IFGPUModel',
  'The current share of a GPU and the place in the queue, polled once per tab.'
);
