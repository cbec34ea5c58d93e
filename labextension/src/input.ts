import type { ServerConnection } from '@jupyterlab/services';

import { requestAPI } from './request';

/** So often the server is told at most. */
const EVERY_MS = 20_000;

/**
 * Tell the server that somebody is there, as they use the keyboard or a pointer.
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
