import type { ServerConnection } from '@jupyterlab/services';
import { VDomModel } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';

import { canNotify } from './browsernotifications';
import { requestAPI, ResponseError } from './request';
import type {
  IExplanation,
  IFGPUModel,
  IProof,
  IReading,
  ISession,
  IStatus,
  ResizeRequest
} from './tokens';

const DEFAULT_PERIOD_S = 10;
const LONGEST_PERIOD_S = 300;
const HIDDEN_PERIOD_S = 60;
/** How often, and at what distance, the status is read until a session that its owner parks is parked. */
const PARK_TRIES = 10;
const PARK_TRY_MS = 2000;

/**
 * Polls the server extension once for all widgets of a tab. While the tab is hidden it asks once a minute where
 * the browser may notify, and else not at all.
 */
export class FGPUModel extends VDomModel implements IFGPUModel {
  constructor(settings: ServerConnection.ISettings) {
    super();
    this._settings = settings;
    this._poll = new Poll({
      auto: false,
      name: 'jupyterlab-fgpu:model#status',
      factory: () => this._read(),
      frequency: frequency(DEFAULT_PERIOD_S),
      standby: 'when-hidden',
      linger: 0
    });
    this._hiddenPoll = new Poll({
      auto: false,
      name: 'jupyterlab-fgpu:model#hidden',
      factory: () => this._read(),
      frequency: frequency(HIDDEN_PERIOD_S),
      standby: () => !document.hidden || !canNotify()
    });
    document.addEventListener('visibilitychange', this._onVisibility);
  }

  /** Begin to ask. */
  start(): void {
    void this._poll.start();
    // Not started: its first request would be at once.
    void this._hiddenPoll.schedule();
  }

  pause(): void {
    this._isPaused = true;
    void this._poll.stop();
    void this._hiddenPoll.stop();
  }

  get reading(): IReading {
    return this._reading;
  }

  get statusReceived(): ISignal<IFGPUModel, IStatus> {
    return this._statusReceived;
  }

  watchDetails(on: boolean): void {
    this._watchers += on ? 1 : -1;
    const { status } = this._reading;
    if (on && status !== null && status.details === undefined) {
      void this._poll.refresh();
    }
  }

  get refreshPeriodS(): number {
    return this._poll.frequency.interval / 1000;
  }

  set refreshPeriodS(periodS: number) {
    this._poll.frequency = frequency(periodS);
  }

  async refresh(): Promise<void> {
    await this._poll.refresh();
    try {
      await this._poll.tick;
    } catch {
      // `reading` tells what went wrong.
    }
  }

  async stop(id: number): Promise<void> {
    await this._post(id, 'stop');
  }

  async keep(id: number): Promise<void> {
    await this._post(id, 'keep');
  }

  async extend(id: number): Promise<void> {
    await this._post(id, 'extend');
  }

  async park(id: number): Promise<void> {
    await this._post(id, 'park');
    for (let tries = 0; tries < PARK_TRIES; tries++) {
      await new Promise(resolve => setTimeout(resolve, PARK_TRY_MS));
      await this.refresh();
      const { status } = this._reading;
      const session = [status?.session, ...(status?.others ?? [])].find(
        one => one?.id === id
      );
      if (session?.park_refused) {
        throw new Error(session.park_refused);
      }
      if (session?.state !== 'RUNNING') {
        return;
      }
    }
  }

  async neverPark(id: number, never: boolean): Promise<void> {
    await this._post(id, never ? 'never-park' : 'may-park');
  }

  async wake(id: number): Promise<void> {
    await this._post(id, 'wake');
  }

  async rename(id: number, name: string): Promise<void> {
    await this._post(id, 'rename', { name });
  }

  async resize(id: number, request: ResizeRequest): Promise<ISession> {
    try {
      const { session } = await requestAPI<{ session: ISession }>(
        `sessions/${id}/resize`,
        { method: 'POST', body: JSON.stringify(request) },
        this._settings
      );
      return session;
    } finally {
      // Before the caller shows the result, so that status bar and panel agree with it.
      await this.refresh();
    }
  }

  async scriptTold(): Promise<void> {
    // Without an answer another browser tells it again.
    await requestAPI('script', { method: 'POST' }, this._settings).catch(() => null);
  }

  async proof(begin: boolean): Promise<IProof> {
    return requestAPI<IProof>(
      'proof',
      { method: begin ? 'POST' : 'GET' },
      this._settings
    );
  }

  async explain(triedMib: number | null): Promise<IExplanation> {
    const query = triedMib === null ? '' : `?tried_mib=${triedMib}`;
    const found = await requestAPI<IExplanation>(
      `explain${query}`,
      { method: 'GET' },
      this._settings
    );
    // From now on the server advises no smaller amount.
    void this._poll.refresh();
    return found;
  }

  private async _post(
    id: number,
    action: string,
    body: { name: string } | null = null
  ): Promise<void> {
    try {
      await requestAPI(
        `sessions/${id}/${action}`,
        { method: 'POST', body: body && JSON.stringify(body) },
        this._settings
      );
    } finally {
      // Also after a refusal: the session may have ended.
      void this._poll.refresh();
    }
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    document.removeEventListener('visibilitychange', this._onVisibility);
    this._poll.dispose();
    this._hiddenPoll.dispose();
    Signal.clearData(this);
    super.dispose();
  }

  private async _read(): Promise<void> {
    try {
      const status = await requestAPI<IStatus>(
        this._watchers > 0 && !document.hidden
          ? 'status?details=1'
          : 'status',
        { method: 'GET' },
        this._settings
      );
      this._accept(status);
    } catch (error) {
      const missing = error instanceof ResponseError && error.status === 404;
      this._reading = {
        ...this._reading,
        server: missing ? 'missing' : 'offline'
      };
      this.stateChanged.emit();
      if (this._isPaused) {
        this.pause();
      }
      // The poll backs off when its factory rejects.
      throw error;
    }
  }

  private _accept(status: IStatus): void {
    if (this._isPaused) {
      this._isPaused = false;
      void this._hiddenPoll.schedule();
    }
    this._reading = { server: 'ok', status, receivedAt: Date.now() };
    this.stateChanged.emit();
    // A view without the service lists no sessions.
    if (status.hub === 'ok') {
      this._statusReceived.emit(status);
    }
  }

  private readonly _onVisibility = (): void => {
    // What is shown may be hours old.
    if (
      !document.hidden &&
      Date.now() - this._reading.receivedAt > this._poll.frequency.interval
    ) {
      void this._poll.refresh();
    }
  };

  private _reading: IReading = {
    server: 'loading',
    status: null,
    receivedAt: 0
  };
  private readonly _poll: Poll;
  private readonly _hiddenPoll: Poll;
  private readonly _statusReceived = new Signal<IFGPUModel, IStatus>(this);
  private _watchers = 0;
  private _isPaused = false;
  private readonly _settings: ServerConnection.ISettings;
}

function frequency(periodS: number) {
  return {
    interval: periodS * 1000,
    backoff: true,
    max: LONGEST_PERIOD_S * 1000
  };
}
