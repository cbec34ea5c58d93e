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

export interface ISession {
  id: number | null;
  server_name: string;
  display_name: string;
  state: string;
  image_name: string | null;
  resource_group: string | null;
  /** What was asked for of a GPU, in words: "0.5 fGPU", "5120 MiB + 25 %". */
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
  forecast_basis: string | null;
  /** How far its image is, in words, while it is fetched. */
  pull_text: string | null;
  message: string | null;
  /** Why it is about to be ended, in words; `ends_at_s` is when. */
  warning: string | null;
  ends_at_s: number | null;
  can_keep: boolean;
  url: string | null;
  pending_url: string | null;
  simulated: boolean;
}

export interface IThisSession extends ISession {
  source: 'service' | 'environment';
  gpu_memory_used_mib: number | null;
  gpu_memory_used_reason: string | null;
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
  simulated: boolean;
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
  /** Emits a session of the user that waited and now runs. */
  readonly ready: ISignal<IFGPUModel, ISession>;
  /** Seconds between two refreshes. */
  refreshPeriodS: number;
  /** Ask now, instead of at the next period. */
  refresh(): Promise<void>;
  /** End or cancel another session of the user; rejects with a message to show. */
  stop(id: number): Promise<void>;
  /** Keep an idle session that is about to be ended; rejects with a message to show. */
  keep(id: number): Promise<void>;
}

export const IFGPUModel = new Token<IFGPUModel>(
  'jupyterlab-fgpu:IFGPUModel',
  'The current share of a GPU and the place in the queue, polled once per tab.'
);
