import { Notification } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { endText, parkedText, roundText } from './format';
import { hubHref, type IHubLocation } from './links';
import { type INews, news } from './news';
import { browserStorage, Kept } from './once';
import { mayNotify, notify } from './outside';
import type { IFGPUModel, ISession, IStatus } from './tokens';

/** Which notifications the user wants. */
export interface IWishes {
  ready: boolean;
  ending: boolean;
}

/**
 * Show a notification for what is new of the user's sessions: each once, also after a reload or in another tab.
 * A hidden tab has the browser show it, and Lab shows it when the tab is seen again.
 */
export function addNotices(
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  wishes: IWishes,
  keep: (session: ISession) => void,
  extend: (session: ISession) => void
): void {
  const prefix = `jupyterlab-fgpu:${PageConfig.getBaseUrl()}:`;
  const storage = browserStorage();
  const waiting = new Kept(`${prefix}waiting`, storage);
  const told = new Kept(`${prefix}told`, storage);
  // Apart, so that what the browser has shown is still news to Lab.
  const waitingOutside = new Kept(`${prefix}outside:waiting`, storage);
  const toldOutside = new Kept(`${prefix}outside:told`, storage);
  /** Warnings that are shown, by session, with the end that they speak of. */
  const shown = new Map<number | null, { id: string; ends: number | null }>();

  const text = ({ kind, session }: INews): string => {
    const name = session.display_name || trans.__('the session');
    const end = endText(session, Date.now(), trans) ?? '';
    switch (kind) {
      case 'ready':
        return trans.__('Your session %1 is ready', name);
      case 'keep':
        return trans.__('%1 ends soon unless you use it. %2', name, end);
      default:
        return trans.__('%1 ends soon. %2', name, end);
    }
  };
  const isWished = (one: INews): boolean =>
    one.kind === 'ready' ? wishes.ready : wishes.ending;

  const show = (one: INews): void => {
    const { session } = one;
    if (one.kind === 'ready') {
      const href = hubHref(hub, session.url);
      Notification.success(text(one), {
        // It says so once; the user may be looking elsewhere when it does.
        autoClose: false,
        actions:
          href === null
            ? []
            : [
                {
                  label: trans.__('Open'),
                  callback: () => window.open(href, '_blank', 'noopener')
                }
              ]
      });
      return;
    }
    const id = Notification.warning(text(one), {
      autoClose: false,
      actions:
        one.kind === 'keep'
          ? [{ label: trans.__('Keep running'), callback: () => keep(session) }]
          : session.extend_by_s === null
            ? []
            : [
                {
                  label: trans.__(
                    'Extend by %1',
                    roundText(session.extend_by_s, trans)
                  ),
                  callback: () => extend(session)
                }
              ]
    });
    shown.set(session.id, { id, ends: session.ends_at_s });
  };

  /** The notification while a call of this session waits for the GPU. */
  let waits: string | null = null;
  const showWait = (session: ISession | null): void => {
    const isWaiting = session?.parked?.wanted || session?.state === 'RESUMING';
    const message =
      session !== null && isWaiting ? parkedText(session, Date.now(), trans) : null;
    if (message === null) {
      if (waits !== null) {
        Notification.dismiss(waits);
      }
      waits = null;
    } else if (waits === null) {
      waits = Notification.emit(message, 'in-progress', { autoClose: false });
    } else {
      Notification.update({ id: waits, message });
    }
  };

  model.told.connect((_, status: IStatus) => {
    showWait(status.session);
    const all = [...(status.session ? [status.session] : []), ...status.others];
    for (const [sessionId, warning] of shown) {
      const ends = all.find(s => s.id === sessionId)?.ends_at_s ?? null;
      if (ends !== warning.ends) {
        // Kept, used again, or gone: what it says is no longer so.
        Notification.dismiss(warning.id);
        shown.delete(sessionId);
      }
    }
    const now = Date.now();
    // Also while this tab is seen, so that a hidden one does not say it again.
    const outside = news(status, now, waitingOutside, toldOutside);
    if (!document.hidden) {
      news(status, now, waiting, told).filter(isWished).forEach(show);
    } else if (mayNotify()) {
      outside
        .filter(isWished)
        .forEach(one =>
          notify(text(one), `fgpu ${one.kind} ${one.session.id}`)
        );
    }
  });
}

/** Show why a wish was refused, as the service worded it. */
export async function wished(
  wish: Promise<void>,
  trans: TranslationBundle
): Promise<void> {
  try {
    await wish;
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    Notification.error(trans.__('Not done: %1', why), { autoClose: false });
  }
}
