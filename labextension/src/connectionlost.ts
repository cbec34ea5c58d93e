import type { JupyterFrontEnd, JupyterLab } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { endWords, type IEnd } from './endwords';
import { againHref, type IHubLocation, servicePageHref } from './links';
import type { IFGPUModel } from './tokens';

const RESTART = 'hub:restart';
const MOST_TRIES = 12;
const AGAIN_MS = 1000;
const PATIENCE_MS = 5000;

let shown = false;
/** The session with an end that was reported already. */
let told: number | null = null;
/** The session that is being ended here. */
let ending: number | null = null;

/** Note that a session is being ended here: its connection may be lost before the answer comes. Null: it is over. */
export function noteEnding(id: number | null): void {
  ending = id;
}

/**
 * Say why the session has ended, once; `byOwner` where that was done here.
 *
 * The Hub answers in place of the server that is gone, and its page says it. On a Hub with a domain for each user that
 * page is another site: there is a link.
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
  if (shown || (id !== null && id === told)) {
    return;
  }
  byOwner ||= id !== null && id === ending;
  shown = true;
  const connected = (is: boolean): void => {
    if (info !== null) {
      info.isConnected = is;
    }
  };
  // Until then JupyterLab does not poll or save: each try would fail with a dialog.
  connected(false);
  /** Go on where the session was started again in another tab. */
  const back = (): void => {
    if (model.reading.server === 'ok') {
      model.stateChanged.disconnect(back);
      told = null;
      connected(true);
    }
  };
  try {
    const end = await readEnd(byOwner);
    if (end === 'runs') {
      // Lab connects again by itself.
      if (byOwner) {
        Notification.error(trans.__('This session still runs: ending it failed. Try again.'), {
          autoClose: false
        });
      }
      return;
    }
    if (end !== null && end !== 'away') {
      told = id;
      model.rest();
      model.stateChanged.connect(back);
    }
    const knows = model.reading.status?.hub !== 'absent';
    const page = knows ? servicePageHref(hub) : null;
    await tell(app, trans, page, againHref(hub, model.reading.status), end, byOwner);
  } finally {
    shown = false;
    connected(id === null || told !== id);
  }
}

async function tell(
  app: JupyterFrontEnd,
  trans: TranslationBundle,
  page: string | null,
  form: string | null,
  end: IEnd | 'away' | null,
  byOwner: boolean
): Promise<void> {
  const buttons = [Dialog.cancelButton({ label: trans.__('Dismiss') })];
  const sessions = Dialog.createButton({ label: trans.__('My Sessions') });
  const again = Dialog.okButton({ label: trans.__('Start Again') });
  if (page !== null && end !== 'away') {
    buttons.push(sessions);
  }
  const ended = end !== null && end !== 'away';
  if (end !== 'away' && (form !== null || app.commands.hasCommand(RESTART))) {
    buttons.push(again);
  }
  const answer = await showDialog({
    title:
      ended
        ? trans.__('Your session has ended')
        : end === 'away'
          ? trans.__('JupyterHub does not answer')
          : trans.__('Your session does not answer'),
    body: !ended
      ? end === 'away'
        ? trans.__('Your session may still run. Leave this tab open: it connects again once JupyterHub is back.')
        : trans.__(
            'It may have ended, or JupyterHub or your network is away. If other web pages open, wait: this tab connects again by itself.'
          )
      : byOwner && end.cause === 'USER'
        ? trans.__('You ended it.')
        : endWords(end, trans),
    buttons,
    // It may appear while the user types.
    defaultButton: 0
  });
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

/**
 * Read how the session of this server has ended; null where that is not known, 'away' where something answers in place
 * of JupyterHub, which is down. One that `ends` may answer still.
 */
async function readEnd(ends: boolean): Promise<IEnd | 'runs' | 'away' | null> {
  const url = `${PageConfig.getBaseUrl()}lab`;
  let runs = false;
  let away = false;
  for (let tries = MOST_TRIES; tries > 0; tries--) {
    try {
      const answer = await fetch(url, {
        headers: { Accept: 'text/html' },
        cache: 'no-store',
        signal: AbortSignal.timeout(PATIENCE_MS)
      });
      runs = answer.ok && answer.url.startsWith(url);
      away = answer.status >= 500;
      if (runs && !ends) {
        return 'runs';
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
      away = false;
    }
    // It goes down: what is left of it, and why, is known in a moment.
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
  }
  return runs ? 'runs' : away ? 'away' : null;
}
