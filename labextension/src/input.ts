import type { ServerConnection } from '@jupyterlab/services';

import { requestAPI } from './request';

/** Least time between two reports to the server. */
const EVERY_MS = 20_000;

/**
 * Tell the server that a user is there, by their keyboard or pointer.
 *
 * A tab that is only open does not keep an idle session.
 */
export function tellOfInput(settings: ServerConnection.ISettings): void {
  let toldAt = -EVERY_MS;
  const tell = (): void => {
    if (performance.now() - toldAt < EVERY_MS) {
      return;
    }
    toldAt = performance.now();
    requestAPI('input', { method: 'POST' }, settings).catch(() => {
      // The next input tells it again.
      toldAt = -EVERY_MS;
    });
  };
  for (const kind of ['keydown', 'pointerdown', 'pointermove', 'wheel']) {
    document.addEventListener(kind, tell, { capture: true, passive: true });
  }
}
