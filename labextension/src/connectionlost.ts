import type { JupyterFrontEnd, JupyterLab } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { endWords, type IEnd } from './endwords';
import { type IHubLocation, servicePageHref } from './links';
import type { IFGPUModel } from './tokens';

const RESTART = 'hub:restart';
const MOST_TRIES = 12;
const AGAIN_MS = 1000;
const PATIENCE_MS = 5000;

let shown = false;
/** The session whose end was told already. */
let told: number | null = null;
/** The session that is being ended here. */
let ending: number | null = null;

/** Note that a session is being ended here: its connection may be lost before the answer comes. Null: not any more. */
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
  if (info !== null) {
    // Nothing is saved meanwhile: each try would fail with a dialog of its own.
    info.isConnected = false;
  }
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
    if (end !== null) {
      told = id;
    }
    const knows = model.reading.status?.hub !== 'absent';
    await tell(app, trans, knows ? servicePageHref(hub) : null, end, byOwner);
  } finally {
    shown = false;
    if (info !== null) {
      info.isConnected = true;
    }
  }
}

async function tell(
  app: JupyterFrontEnd,
  trans: TranslationBundle,
  page: string | null,
  end: IEnd | null,
  byOwner: boolean
): Promise<void> {
  const buttons = [Dialog.cancelButton({ label: trans.__('Dismiss') })];
  const sessions = Dialog.createButton({ label: trans.__('My Sessions') });
  const again = Dialog.okButton({ label: trans.__('Start Again') });
  if (page !== null) {
    buttons.push(sessions);
  }
  if (app.commands.hasCommand(RESTART)) {
    buttons.push(again);
  }
  const answer = await showDialog({
    title:
      end !== null
        ? trans.__('Your session has ended')
        : trans.__('Your session does not answer'),
    body:
      byOwner && end?.cause === 'USER'
        ? trans.__('You ended it.')
        : end !== null
          ? endWords(end, trans)
          : trans.__('It may have ended, or your network is away. Check your network first.'),
    buttons,
    // It comes up while somebody types.
    defaultButton: 0
  });
  if (answer.button.label === sessions.label && page !== null) {
    window.location.assign(page);
  } else if (answer.button.label === again.label) {
    await app.commands.execute(RESTART);
  }
}

/** Read how the session of this server has ended; null where that is not known. One that `ends` may answer still. */
async function readEnd(ends: boolean): Promise<IEnd | 'runs' | null> {
  const url = `${PageConfig.getBaseUrl()}lab`;
  let runs = false;
  for (let tries = MOST_TRIES; tries > 0; tries--) {
    try {
      const answer = await fetch(url, {
        headers: { Accept: 'text/html' },
        cache: 'no-store',
        signal: AbortSignal.timeout(PATIENCE_MS)
      });
      runs = answer.ok && answer.url.startsWith(url);
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
      // Another site, or nobody answers.
    }
    // It goes down: what is left of it, and why, is known in a moment.
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
  }
  return runs ? 'runs' : null;
}
