import type { ServerConnection } from '@jupyterlab/services';
import { VDomModel } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';

import { becameReady } from './format';
import { requestAPI, ResponseError } from './request';
import type { IFGPUModel, IReading, ISession, IStatus } from './tokens';

const DEFAULT_PERIOD_S = 10;
const LONGEST_PERIOD_S = 300;

/** Polls the server extension once for all widgets of a tab, and not while the tab is hidden. */
export class FGPUModel extends VDomModel implements IFGPUModel {
  constructor(settings: ServerConnection.ISettings) {
    super();
    this._settings = settings;
    this._poll = new Poll({
      name: 'jupyterlab-fgpu:model#status',
      factory: () => this._read(),
      frequency: frequency(DEFAULT_PERIOD_S),
      standby: 'when-hidden'
    });
  }

  get reading(): IReading {
    return this._reading;
  }

  get ready(): ISignal<IFGPUModel, ISession> {
    return this._ready;
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

  private async _wish(id: number, what: 'stop' | 'keep'): Promise<void> {
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
    this._poll.dispose();
    Signal.clearData(this);
    super.dispose();
  }

  private async _read(): Promise<void> {
    try {
      const status = await requestAPI<IStatus>(
        'status',
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
      // The poll backs off when its factory rejects.
      throw error;
    }
  }

  private _accept(status: IStatus): void {
    this._reading = { server: 'ok', status, receivedAt: Date.now() };
    this.stateChanged.emit();
    // A view without the service lists no sessions, so only two good ones can be compared.
    if (status.hub === 'ok') {
      for (const session of becameReady(this._lastOthers, status.others)) {
        this._ready.emit(session);
      }
      this._lastOthers = status.others;
    }
  }

  private _reading: IReading = {
    server: 'loading',
    status: null,
    receivedAt: 0
  };
  private _lastOthers: readonly ISession[] = [];
  private readonly _poll: Poll;
  private readonly _ready = new Signal<IFGPUModel, ISession>(this);
  private readonly _settings: ServerConnection.ISettings;
}

function frequency(periodS: number) {
  return {
    interval: periodS * 1000,
    backoff: true,
    max: LONGEST_PERIOD_S * 1000
  };
}
