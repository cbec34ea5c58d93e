import { ReactWidget } from '@jupyterlab/ui-components';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import { instantText } from './format';
import { isThisSession, savedShare } from './savedshare';
import { Details, Facts } from './thissession';
import { Queue } from './queue';
import type { IContext } from './parts';
import type { IFGPUModel } from './tokens';

/** What `GPUWidget` leaves in a notebook (jupyterlab_fgpu/widget.py). */
export const SHARE_MIME = 'application/vnd.fgpu.share+json';

/** The live view of the session as its cell's output; in another one, or in none, what the kernel saw. */
export class ShareView extends ReactWidget implements IRenderMime.IRenderer {
  constructor(
    private readonly _model: IFGPUModel,
    private readonly _context: IContext
  ) {
    super();
    this.addClass('jp-fgpu-Share');
    _model.stateChanged.connect(this.update, this);
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this._saved = savedShare(model.data[SHARE_MIME]);
    this.update();
  }

  dispose(): void {
    if (!this.isDisposed) {
      this._model.stateChanged.disconnect(this.update, this);
      this._watch(false);
      super.dispose();
    }
  }

  protected render(): JSX.Element {
    const { trans } = this._context;
    const { status } = this._model.reading;
    const { text, atS, session } = this._saved;
    if (status === null || status.session === null || !isThisSession(this._saved, status)) {
      return (
        <>
          {status !== null && session !== null && atS !== null && (
            <p className="jp-fgpu-Minor">
              {trans.__(
                'Another session, as it was at %1. Run the cell again to see this one.',
                instantText(atS, Date.now())
              )}
            </p>
          )}
          <pre>{text}</pre>
        </>
      );
    }
    return (
      <section aria-label={trans.__('GPU share')}>
        <Facts session={status.session} trans={trans} />
        <Details status={status} context={this._context} />
        <Queue status={status} context={this._context} />
      </section>
    );
  }

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this._watch(true);
  }

  protected onBeforeDetach(message: Message): void {
    this._watch(false);
    super.onBeforeDetach(message);
  }

  private _watch(on: boolean): void {
    if (on !== this._watching) {
      this._watching = on;
      this._model.watchDetails(on);
    }
  }

  private _saved = savedShare(undefined);
  private _watching = false;
}
