import type { ServerConnection } from '@jupyterlab/services';

import { requestAPI } from './request';

/** Least time between two reports to the server. */
const EVERY_MS = 20_000;

/** Report keyboard and pointer to the server: an open tab alone does not count as use of the session. */
export function reportInput(settings: ServerConnection.ISettings): void {
  let reportedAt = -EVERY_MS;
  const report = (): void => {
    if (performance.now() - reportedAt < EVERY_MS) {
      return;
    }
    reportedAt = performance.now();
    requestAPI('input', { method: 'POST' }, settings).catch(() => {
      // The next input is reported again.
      reportedAt = -EVERY_MS;
    });
  };
  for (const kind of ['keydown', 'pointerdown', 'pointermove', 'wheel']) {
    document.addEventListener(kind, report, { capture: true, passive: true });
  }
}
