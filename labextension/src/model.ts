import type { ServerConnection } from '@jupyterlab/services';
import { VDomModel } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';

import { mayNotify } from './outside';
import { requestAPI, ResponseError } from './request';
import type {
  IExplanation,
  IFGPUModel,
  IProof,
  IReading,
  ISession,
  IStatus,
  Wanted
} from './tokens';

const DEFAULT_PERIOD_S = 10;
const LONGEST_PERIOD_S = 300;
const HIDDEN_PERIOD_S = 60;

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
      standby: () => !document.hidden || !mayNotify()
    });
    document.addEventListener('visibilitychange', this._onVisibility);
  }

  /** Begin to ask. */
  start(): void {
    void this._poll.start();
    // Not started: its first request would be at once.
    void this._hiddenPoll.schedule();
  }

  rest(): void {
    this._resting = true;
    void this._poll.stop();
    void this._hiddenPoll.stop();
  }

  get reading(): IReading {
    return this._reading;
  }

  get told(): ISignal<IFGPUModel, IStatus> {
    return this._told;
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
    await this._wish(id, 'stop');
  }

  async keep(id: number): Promise<void> {
    await this._wish(id, 'keep');
  }

  async extend(id: number): Promise<void> {
    await this._wish(id, 'extend');
  }

  async park(id: number): Promise<void> {
    await this._wish(id, 'park');
  }

  async wake(id: number): Promise<void> {
    await this._wish(id, 'wake');
  }

  async resize(id: number, wanted: Wanted): Promise<ISession> {
    try {
      const { session } = await requestAPI<{ session: ISession }>(
        `sessions/${id}/resize`,
        { method: 'POST', body: JSON.stringify(wanted) },
        this._settings
      );
      return session;
    } finally {
      // Before it is told that it is done: status bar and panel say the same.
      await this.refresh();
    }
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
    // The panel may advise less still: the server knows better from now on.
    void this._poll.refresh();
    return found;
  }

  private async _wish(
    id: number,
    what: 'stop' | 'keep' | 'extend' | 'park' | 'wake'
  ): Promise<void> {
    try {
      await requestAPI(
        `sessions/${id}/${what}`,
        { method: 'POST' },
        this._settings
      );
    } finally {
      // Also after a refusal: the session may have ended by itself.
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
      if (this._resting) {
        this.rest();
      }
      // The poll backs off when its factory rejects.
      throw error;
    }
  }

  private _accept(status: IStatus): void {
    if (this._resting) {
      this._resting = false;
      void this._hiddenPoll.schedule();
    }
    this._reading = { server: 'ok', status, receivedAt: Date.now() };
    this.stateChanged.emit();
    // A view without the service lists no sessions.
    if (status.hub === 'ok') {
      this._told.emit(status);
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
  private readonly _told = new Signal<IFGPUModel, IStatus>(this);
  private _watchers = 0;
  private _resting = false;
  private readonly _settings: ServerConnection.ISettings;
}

function frequency(periodS: number) {
  return {
    interval: periodS * 1000,
    backoff: true,
    max: LONGEST_PERIOD_S * 1000
  };
}
