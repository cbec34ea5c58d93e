import type { JupyterFrontEnd, JupyterLab } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { endReasonText, type IEnd } from './endreason';
import { type IHubLocation, restartHref, servicePageHref } from './links';
import type { IFGPUModel } from './tokens';

const RESTART = 'hub:restart';
const MAX_TRIES = 12;
const RETRY_MS = 1000;
const TIMEOUT_MS = 5000;

let isOpen = false;
/** The session with an end that was shown already. */
let reportedSession: number | null = null;
/** The session that this tab is ending. */
let endingSession: number | null = null;

/** What answers at the server's address in place of an end: the server itself, a proxy without its Hub, or unknown. */
type NoEnd = 'running' | 'hub-down' | 'unknown';

/** Note the session that this tab is ending, or null: its connection may be lost before the answer comes. */
export function setEndingSession(id: number | null): void {
  endingSession = id;
}

/**
 * Show once why the session has ended; `byOwner` if this tab ended it.
 *
 * The Hub's page at the server's address says it. On a Hub with a domain for each user that page is another site, and
 * the dialog has a link.
 */
export async function showEnd(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  info: JupyterLab.IInfo | null,
  byOwner = false
): Promise<void> {
  const id = model.reading.status?.session?.id ?? null;
  if (isOpen || (id !== null && id === reportedSession)) {
    return;
  }
  byOwner ||= id !== null && id === endingSession;
  isOpen = true;
  const setConnected = (isConnected: boolean): void => {
    if (info !== null) {
      info.isConnected = isConnected;
    }
  };
  // Until then JupyterLab does not poll or save: each try would fail with a dialog.
  setConnected(false);
  /** Continue once the session was started again in another tab. */
  const resume = (): void => {
    if (model.reading.server === 'ok') {
      model.stateChanged.disconnect(resume);
      reportedSession = null;
      setConnected(true);
    }
  };
  try {
    const end = await readEnd(byOwner);
    if (end === 'running') {
      // Lab connects again without help.
      if (byOwner) {
        Notification.error(trans.__('This session still runs: ending it failed. Try again.'), {
          autoClose: false
        });
      }
      return;
    }
    if (typeof end !== 'string') {
      reportedSession = id;
      model.pause();
      model.stateChanged.connect(resume);
    }
    const hasService = model.reading.status?.hub !== 'absent';
    const page = hasService ? servicePageHref(hub) : null;
    await showEndDialog(app, trans, page, restartHref(hub, model.reading.status), end, byOwner);
  } finally {
    isOpen = false;
    setConnected(id === null || reportedSession !== id);
  }
}

async function showEndDialog(
  app: JupyterFrontEnd,
  trans: TranslationBundle,
  page: string | null,
  form: string | null,
  end: IEnd | NoEnd,
  byOwner: boolean
): Promise<void> {
  const buttons = [Dialog.cancelButton({ label: trans.__('Dismiss') })];
  const sessions = Dialog.createButton({ label: trans.__('My Sessions') });
  const again = Dialog.okButton({ label: trans.__('Start Again') });
  if (page !== null && end !== 'hub-down') {
    buttons.push(sessions);
  }
  if (end !== 'hub-down' && (form !== null || app.commands.hasCommand(RESTART))) {
    buttons.push(again);
  }
  const [title, body] = endText(end, byOwner, trans);
  // It may appear while the user types: the default button is the harmless one.
  const answer = await showDialog({ title, body, buttons, defaultButton: 0 });
  if (answer.button.label === sessions.label && page !== null) {
    window.location.assign(page);
  } else if (answer.button.label === again.label) {
    if (form !== null) {
      window.open(form, '_blank', 'noopener');
    } else {
      await app.commands.execute(RESTART);
    }
  }
}

/** Return title and body of the dialog. */
function endText(end: IEnd | NoEnd, byOwner: boolean, trans: TranslationBundle): [string, string] {
  if (typeof end !== 'string') {
    const isOwn = byOwner && end.cause === 'USER';
    return [
      trans.__('Your session has ended'),
      isOwn ? trans.__('You ended it.') : endReasonText(end, trans)
    ];
  }
  return end === 'hub-down'
    ? [
        trans.__('JupyterHub does not answer'),
        trans.__('Your session may still run. Leave this tab open: it connects again once JupyterHub is back.')
      ]
    : [
        trans.__('Your session does not answer'),
        trans.__(
          'It may have ended, or JupyterHub or your network is away. If other web pages open, wait: this tab connects again by itself.'
        )
      ];
}

/** Read how this server's session has ended. With `isEnding` its server may still answer for a moment. */
async function readEnd(isEnding: boolean): Promise<IEnd | NoEnd> {
  const url = `${PageConfig.getBaseUrl()}lab`;
  let isRunning = false;
  let isHubDown = false;
  for (let tries = MAX_TRIES; tries > 0; tries--) {
    try {
      const answer = await fetch(url, {
        headers: { Accept: 'text/html' },
        cache: 'no-store',
        signal: AbortSignal.timeout(TIMEOUT_MS)
      });
      isRunning = answer.ok && answer.url.startsWith(url);
      isHubDown = answer.status >= 500;
      if (isRunning && !isEnding) {
        return 'running';
      }
      const page = new DOMParser().parseFromString(
        await answer.text(),
        'text/html'
      );
      const end = page.getElementById('fgpu-end');
      if (end !== null) {
        return {
          cause: end.dataset['cause'] ?? null,
          message: end.textContent ?? ''
        };
      }
    } catch {
      // Another site, or no answer.
      isHubDown = false;
    }
    // While the server goes down, the Hub does not know the cause yet.
    await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  }
  return isRunning ? 'running' : isHubDown ? 'hub-down' : 'unknown';
}
