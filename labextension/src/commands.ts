import type { JupyterFrontEnd } from '@jupyterlab/application';
import {
  Dialog,
  InputDialog,
  Notification,
  showDialog
} from '@jupyterlab/apputils';
import { DocumentWidget } from '@jupyterlab/docregistry';
import type { TranslationBundle } from '@jupyterlab/translation';
import { refreshIcon } from '@jupyterlab/ui-components';

import { canRequestPermission, requestPermission } from './browsernotifications';
import { setEndingSession } from './connectionlost';
import { sessionName } from './format';
import { sliceIcon } from './icon';
import { type IHubLocation, launchFormHref, servicePageHref } from './links';
import { showFailure } from './notices';
import { ResponseError } from './request';
import type { IFGPUModel } from './tokens';

export namespace CommandIDs {
  export const showPanel = 'fgpu:show-panel';
  export const refresh = 'fgpu:refresh';
  export const openServicePage = 'fgpu:open-service-page';
  export const launchSession = 'fgpu:launch-session';
  export const notifyWhileHidden = 'fgpu:notify-while-hidden';
  export const stopSession = 'fgpu:stop-session';
  export const keepSession = 'fgpu:keep-session';
  export const extendSession = 'fgpu:extend-session';
  export const endThisSession = 'fgpu:end-this-session';
  export const renameThisSession = 'fgpu:rename-this-session';
}

const NO_ARGS = { args: { type: 'object', properties: {} } };

/**
 * Register the commands; `panelId` is the widget that `fgpu:show-panel` reveals, `ended` is called when this session
 * was ended here.
 */
export function addCommands(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  panelId: string,
  ended: () => void
): void {
  app.commands.addCommand(CommandIDs.showPanel, {
    label: trans.__('Show GPU Share'),
    caption: trans.__('Show your share of a GPU, your sessions and the queue'),
    icon: sliceIcon,
    describedBy: NO_ARGS,
    execute: () => app.shell.activateById(panelId)
  });

  app.commands.addCommand(CommandIDs.refresh, {
    label: trans.__('Refresh GPU Share'),
    icon: refreshIcon,
    describedBy: NO_ARGS,
    execute: () => model.refresh()
  });

  app.commands.addCommand(CommandIDs.openServicePage, {
    label: trans.__('Open the GPU Sessions Page'),
    describedBy: NO_ARGS,
    isEnabled: () => servicePageHref(hub) !== null,
    isVisible: () => servicePageHref(hub) !== null,
    execute: () => {
      const href = servicePageHref(hub);
      if (href !== null) {
        window.open(href, '_blank', 'noopener');
      }
    }
  });

  const newHref = () =>
    model.reading.status === null ? null : launchFormHref(hub, model.reading.status);
  app.commands.addCommand(CommandIDs.launchSession, {
    label: trans.__('Launch Another GPU Session'),
    caption: trans.__("Open the Hub's form for one more session"),
    describedBy: NO_ARGS,
    isEnabled: () => newHref() !== null,
    isVisible: () => newHref() !== null,
    execute: () => {
      const href = newHref();
      if (href !== null) {
        window.open(href, '_blank', 'noopener');
      }
    }
  });
  // The Hub and the session's owner are known only after the first answer.
  model.stateChanged.connect(() =>
    app.commands.notifyCommandChanged(CommandIDs.launchSession)
  );

  app.commands.addCommand(CommandIDs.notifyWhileHidden, {
    label: trans.__('Notify Me of GPU Sessions Also While This Tab Is Hidden'),
    caption: trans.__('Ask the browser to allow notifications'),
    describedBy: NO_ARGS,
    isEnabled: canRequestPermission,
    isVisible: canRequestPermission,
    execute: async () => {
      await requestPermission();
      app.commands.notifyCommandChanged(CommandIDs.notifyWhileHidden);
    }
  });

  const sessionId = {
    args: {
      type: 'object',
      required: ['id'],
      properties: {
        id: { type: 'integer', description: trans.__('The id of one of my sessions') }
      }
    }
  };
  app.commands.addCommand(CommandIDs.stopSession, {
    label: trans.__('End or Cancel Another GPU Session'),
    describedBy: sessionId,
    execute: args => stopSession(model, args['id'], trans)
  });
  app.commands.addCommand(CommandIDs.keepSession, {
    label: trans.__('Keep an Idle GPU Session'),
    describedBy: sessionId,
    execute: args =>
      showFailure(model.keep(args['id'] as number), trans, why =>
        trans.__('The session was not kept: %1', why)
      )
  });
  app.commands.addCommand(CommandIDs.extendSession, {
    label: trans.__('Extend the Time Limit of a GPU Session'),
    describedBy: sessionId,
    execute: args => extendSession(model, args['id'] as number, trans)
  });

  const thisId = () => model.reading.status?.session?.id ?? null;
  app.commands.addCommand(CommandIDs.endThisSession, {
    label: trans.__('End This GPU Session'),
    caption: trans.__('Stop this JupyterLab, and give its GPU back'),
    describedBy: NO_ARGS,
    isEnabled: () => thisId() !== null,
    isVisible: () => thisId() !== null,
    execute: () => endThisSession(app, model, trans, ended)
  });
  app.commands.addCommand(CommandIDs.renameThisSession, {
    label: trans.__('Rename This GPU Session'),
    describedBy: NO_ARGS,
    isEnabled: () => thisId() !== null,
    isVisible: () => thisId() !== null,
    execute: () => renameThisSession(model, trans)
  });
  model.stateChanged.connect(() => {
    app.commands.notifyCommandChanged(CommandIDs.endThisSession);
    app.commands.notifyCommandChanged(CommandIDs.renameThisSession);
  });
}

/** Ask for this session's new name, then set it, or show why the service refused. */
async function renameThisSession(
  model: IFGPUModel,
  trans: TranslationBundle
): Promise<void> {
  const session = model.reading.status?.session ?? null;
  if (session === null || session.id === null) {
    return;
  }
  const { button, value } = await InputDialog.getText({
    title: trans.__('Rename this session'),
    label: trans.__('Its name, in your list and here'),
    text: session.display_name,
    okLabel: trans.__('Rename')
  });
  if (button.accept && value !== null && value !== session.display_name) {
    await showFailure(model.rename(session.id, value), trans);
  }
}

/** Extend the time limit and say so, or show why the service refused. */
async function extendSession(
  model: IFGPUModel,
  id: number,
  trans: TranslationBundle
): Promise<void> {
  const extended = model.extend(id).then(() => {
    Notification.success(trans.__('The session has more time.'), { autoClose: 5000 });
  });
  await showFailure(extended, trans, why =>
    trans.__('The time limit stays: %1', why)
  );
}

/** Ask the user, then end the session that this JupyterLab is in. */
async function endThisSession(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  ended: () => void
): Promise<void> {
  const id = model.reading.status?.session?.id ?? null;
  if (id === null) {
    return;
  }
  const unsaved = [...app.shell.widgets('main')].filter(
    widget => widget instanceof DocumentWidget && widget.context.model.dirty
  ).length;
  const lost = trans.__(
    'Its kernels and terminals stop. You lose their variables and running programs.'
  );
  const answer = await showDialog({
    title: trans.__('End this session?'),
    body:
      unsaved === 0
        ? lost
        : trans._n(
            '%2 One open file has unsaved changes. Save it first.',
            '%2 %1 open files have unsaved changes. Save them first.',
            unsaved,
            lost
          ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Keep running') }),
      Dialog.warnButton({ label: trans.__('End') })
    ],
    defaultButton: 0
  });
  if (!answer.button.accept) {
    return;
  }
  setEndingSession(id);
  try {
    await model.stop(id);
  } catch (error) {
    if (error instanceof ResponseError && error.coded) {
      setEndingSession(null);
      Notification.error(
        trans.__('This session was not ended: %1', error.message),
        { autoClose: false }
      );
      return;
    }
    // This call ends the server that answers it, so the answer may be lost.
  }
  ended();
}

/** Ask the user, then end or cancel the session, or show why the service refused. */
async function stopSession(
  model: IFGPUModel,
  id: unknown,
  trans: TranslationBundle
): Promise<void> {
  const session = model.reading.status?.others.find(other => other.id === id);
  if (session === undefined || session.id === null) {
    throw new Error(
      trans.__('fgpu:stop-session needs the id of one of my other sessions.')
    );
  }
  const name = sessionName(session, trans);
  const isWaiting = session.state === 'PENDING';
  const title = isWaiting
    ? trans.__('Cancel the request %1?', name)
    : trans.__('End %1?', name);
  const answer = await showDialog({
    title,
    body: isWaiting
      ? trans.__('It loses its place in the queue.')
      : trans.__('Its kernels stop. You lose what is only in their memory.'),
    buttons: [
      Dialog.cancelButton({
        label: isWaiting
          ? trans.__('Keep waiting')
          : trans.__('Keep running')
      }),
      Dialog.warnButton({
        label: isWaiting ? trans.__('Cancel the Request') : trans.__('End')
      })
    ],
    defaultButton: 0
  });
  if (!answer.button.accept) {
    return;
  }
  await showFailure(model.stop(session.id), trans, why =>
    isWaiting
      ? trans.__('%1 was not cancelled: %2', name, why)
      : trans.__('%1 was not ended: %2', name, why)
  );
}
