import { Notification } from '@jupyterlab/apputils';
import type { IRunningSessionManagers, IRunningSessions } from '@jupyterlab/running';
import type { TranslationBundle } from '@jupyterlab/translation';

import { amountText, isServerRunning, queueText, sessionName, stateText } from './format';
import { sliceIcon } from './icon';
import { hubHref, type IHubLocation } from './links';
import { stopAll } from './stopall';
import type { IFGPUModel, ISession } from './tokens';

/** Add the user's other sessions, running and waiting, to the panel of what runs. */
export function addRunningSection(
  managers: IRunningSessionManagers,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  stop: (session: ISession) => void
): void {
  const others = () => model.reading.status?.others ?? [];
  const running = (session: ISession): IRunningSessions.IRunningItem => {
    const isRunning = isServerRunning(session);
    const href = hubHref(hub, isRunning ? session.url : session.pending_url);
    const state =
      queueText(session, Date.now(), trans) ?? stateText(session.state, trans);
    const item: IRunningSessions.IRunningItem = {
      icon: () => sliceIcon,
      label: () => sessionName(session, trans),
      labelTitle: () =>
        [amountText(session, trans), session.image_name, state]
          .filter(part => part !== null)
          .join(' · '),
      detail: () => state,
      context: isWaiting(session) ? 'waiting' : 'running'
    };
    if (href !== null) {
      item.open = () => void window.open(href, '_blank', 'noopener');
    }
    if (session.id !== null && session.state !== 'TERMINATING') {
      item.shutdown = () => stop(session);
    }
    return item;
  };
  const endAll = async () => {
    const refused = await stopAll(others(), id => model.stop(id));
    if (refused.length > 0) {
      Notification.error(
        trans._n(
          '%1 session was not ended or cancelled: %2',
          '%1 sessions were not ended or cancelled: %2',
          refused.length,
          [...new Set(refused)].join(' ')
        ),
        { autoClose: false }
      );
    }
  };
  managers.add({
    name: trans.__('GPU Sessions'),
    running: () => others().map(running),
    runningChanged: model.stateChanged,
    refreshRunning: () => void model.refresh(),
    shutdownAll: () => void endAll(),
    shutdownLabel: item =>
      item.context === 'waiting'
        ? trans.__('Cancel the Request')
        : trans.__('End the Session'),
    shutdownAllLabel: trans.__('End and Cancel All'),
    shutdownAllConfirmationText: trans.__(
      'Your other GPU sessions end. You lose what is only in their memory. Your requests lose their places in the queue. This session goes on.'
    )
  });
}

function isWaiting(session: ISession): boolean {
  return session.state === 'PENDING';
}
