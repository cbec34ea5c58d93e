/**
 * The payload of `GET fgpu/api/status` (jupyterlab_fgpu/status.py) and the model's token. What the service's API says
 * is in service.ts.
 * Memory is in MiB, instants (`_at_s`) are UTC seconds; null is "not known", never zero.
 */
import type { VDomRenderer } from '@jupyterlab/ui-components';
import { Token } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';
import type { Banner, Gpu, Session } from './service';

/** A new amount for a session, in the units of its first request. */
export type ResizeRequest =
  | { fgpu: string }
  | { gpu_memory_mib: number; compute_percent?: number };

type MaybeNull<T, K extends keyof T> = Omit<T, K> & { [N in K]: T[N] | null };

export type IGpu = MaybeNull<Gpu, 'fgpu' | 'memory_mib'>;

/** A session of the API; of one that only the environment tells of, what it does not say is null. */
export type ISession = Omit<
  MaybeNull<
    Session,
    | 'id'
    | 'image'
    | 'image_name'
    | 'resource_group'
    | 'amount'
    | 'cpu'
    | 'memory_mib'
    | 'url'
    | 'pending_url'
  >,
  'gpus'
> & { gpus: IGpu[] };

export type IThisSession = ISession & {
  source: 'service' | 'environment';
  gpu_memory_used_mib: number | null;
  gpu_memory_used_reason: string | null;
};

/** One resource: what I hold, and the total of that and what I could still get; in my resource group and overall. */
export interface IBarRow {
  kind: 'fgpu' | 'cpu' | 'memory_mib';
  mine: string;
  total: string;
  percent: number;
  mine_overall: string;
  total_overall: string;
  percent_overall: number;
}

/** A process of this session that holds GPU memory; `notebook` is the path of its kernel's notebook. */
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

/** The cause of an out-of-memory error, and what would help (`GET fgpu/api/explain`). */
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
  /** The owner of these sessions. */
  user: string | null;
  banner: Banner | null;
  bars: { group: string; rows: IBarRow[] } | null;
  /** How the user's start script is; null without one, and once its failure was told. */
  script: {
    state: 'running' | 'done' | 'failed';
    status: number | null;
  } | null;
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
  /** Emits each status that came from the service itself. */
  readonly statusReceived: ISignal<IFGPUModel, IStatus>;
  /** Note that one more view shows details, or one less: they are read only while a view shows them. */
  watchDetails(on: boolean): void;
  /** Seconds between two refreshes. */
  refreshPeriodS: number;
  /** Ask now, instead of at the next period. */
  refresh(): Promise<void>;
  /** Stop polling after the session's end: read only when the tab is shown again, until its server answers. */
  pause(): void;
  /** End or cancel a session of the user; rejects with a message to show. */
  stop(id: number): Promise<void>;
  /** Keep an idle session that is about to be ended; rejects with a message to show. */
  keep(id: number): Promise<void>;
  /** Make the time limit of a session longer; rejects with a message to show. */
  extend(id: number): Promise<void>;
  /**
   * Give a session's GPU to others; its kernels and variables stay. Resolves when it is parked; rejects with a message
   * to show.
   */
  park(id: number): Promise<void>;
  /** Exclude a session from parking, or allow it again; rejects with a message to show. */
  neverPark(id: number, never: boolean): Promise<void>;
  /** Ask for the GPU of a parked session; rejects with a message to show. */
  wake(id: number): Promise<void>;
  /** Give a session another name; rejects with a message to show. */
  rename(id: number, name: string): Promise<void>;
  /** Change a session's amount of its GPU, and return it; rejects with a message to show if it keeps its amount. */
  resize(id: number, request: ResizeRequest): Promise<ISession>;
  /** Note that the user was told of the failed start script: later statuses have it no longer. */
  scriptTold(): Promise<void>;
  /** Read the last result of fgpu-verify, or start it; rejects with a message to show. */
  proof(begin: boolean): Promise<IProof>;
  /** Read the cause of an out-of-memory error; rejects with a message to show. */
  explain(triedMib: number | null): Promise<IExplanation>;
}

export const IFGPUModel = new Token<IFGPUModel>(
  'jupyterlab-fgpu:IFGPUModel',
  'The current share of a GPU and the place in the queue, polled once per tab.'
);
