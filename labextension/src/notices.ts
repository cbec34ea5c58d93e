import { Notification } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { canNotify, showBrowserNotification } from './browsernotifications';
import {
  endText,
  errorText,
  exactDurationText,
  parkedText,
  scriptText,
  sessionName
} from './format';
import { hubHref, type IHubLocation, logHref } from './links';
import { type ISessionEvent, newEvents } from './sessionevents';
import { browserStorage, StoredList } from './storedlist';
import type { IFGPUModel, ISession, IStatus } from './tokens';

/** Which notifications the user wants. */
export interface INotificationSettings {
  ready: boolean;
  ending: boolean;
}

/**
 * Notify of each event of the user's sessions once, also over reloads and tabs.
 * For a hidden tab the browser shows it; Lab shows it again once the tab is visible.
 */
export function addNotices(
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  enabled: INotificationSettings,
  keep: (session: ISession) => void,
  extend: (session: ISession) => void
): void {
  const prefix = `jupyterlab-fgpu:${PageConfig.getBaseUrl()}:`;
  const storage = browserStorage();
  const waiting = new StoredList(`${prefix}waiting`, storage);
  const announced = new StoredList(`${prefix}announced`, storage);
  // Separate lists: Lab also shows what the browser has shown.
  const waitingHidden = new StoredList(`${prefix}hidden:waiting`, storage);
  const announcedHidden = new StoredList(`${prefix}hidden:announced`, storage);
  /** The open warnings by session, each with the end that it names. */
  const warnings = new Map<number | null, { id: string; ends: number | null }>();

  const text = ({ kind, session }: ISessionEvent): string => {
    const name = sessionName(session, trans);
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
  const isEnabled = (one: ISessionEvent): boolean =>
    one.kind === 'ready' ? enabled.ready : enabled.ending;

  const show = (one: ISessionEvent): void => {
    const { session } = one;
    if (one.kind === 'ready') {
      const href = hubHref(hub, session.url);
      Notification.success(text(one), {
        // The user may be looking elsewhere.
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
                    exactDurationText(session.extend_by_s, trans)
                  ),
                  callback: () => extend(session)
                }
              ]
    });
    warnings.set(session.id, { id, ends: session.ends_at_s });
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

  model.statusReceived.connect((_, status: IStatus) => {
    showWait(status.session);
    const all = [...(status.session ? [status.session] : []), ...status.others];
    for (const [sessionId, warning] of warnings) {
      const ends = all.find(s => s.id === sessionId)?.ends_at_s ?? null;
      if (ends !== warning.ends) {
        // The session was kept, used, or has ended.
        Notification.dismiss(warning.id);
        warnings.delete(sessionId);
      }
    }
    const failed = scriptText(status.script, trans);
    if (failed !== null && !document.hidden && status.session !== null) {
      if (announced.addNew(`script ${status.session.id}`)) {
        showFailedScript(failed, logHref(hub, status.session), trans);
        // Other browsers do not have this browser's list.
        void model.scriptTold();
      }
    }
    const now = Date.now();
    // Also for a visible tab, so that a hidden one does not repeat it.
    const hidden = newEvents(status, now, waitingHidden, announcedHidden);
    if (!document.hidden) {
      newEvents(status, now, waiting, announced).filter(isEnabled).forEach(show);
    } else if (canNotify()) {
      hidden
        .filter(isEnabled)
        .forEach(one =>
          showBrowserNotification(text(one), `fgpu ${one.kind} ${one.session.id}`)
        );
    }
  });
}

function showFailedScript(
  message: string,
  href: string | null,
  trans: TranslationBundle
): void {
  const open = () => window.open(href ?? '', '_blank', 'noopener');
  Notification.warning(message, {
    autoClose: false,
    actions: href === null ? [] : [{ label: trans.__('Log'), callback: open }]
  });
}

/** Wait for an action, and show why it failed; `text` puts the service's reason into a sentence. */
export async function showFailure(
  action: Promise<void>,
  trans: TranslationBundle,
  text = (why: string): string => trans.__('Not done: %1', why)
): Promise<void> {
  try {
    await action;
  } catch (error) {
    // Without autoClose it would only count up in the notification centre.
    Notification.error(text(errorText(error)), { autoClose: false });
  }
}
