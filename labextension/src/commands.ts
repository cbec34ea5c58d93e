import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { refreshIcon } from '@jupyterlab/ui-components';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import { sliceIcon } from './icon';
import { formHref, type IHubLocation, servicePageHref } from './links';
import { askToNotify, canAsk } from './outside';
import type { IFGPUModel } from './tokens';

export namespace CommandIDs {
  export const showPanel = 'fgpu:show-panel';
  export const refresh = 'fgpu:refresh';
  export const openServicePage = 'fgpu:open-service-page';
  export const launchSession = 'fgpu:launch-session';
  export const notifyOutside = 'fgpu:notify-while-hidden';
  export const stopSession = 'fgpu:stop-session';
  export const keepSession = 'fgpu:keep-session';
}

const NO_ARGS = { args: { type: 'object', properties: {} } };

/** Register the commands; `panelId` is the widget that `fgpu:show-panel` reveals. */
export function addCommands(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation,
  panelId: string
): void {
  app.commands.addCommand(CommandIDs.showPanel, {
    label: trans.__('Show GPU Share'),
    caption: trans.__('Show the share of a GPU, my sessions and the queue'),
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
    model.reading.status === null ? null : formHref(hub, model.reading.status);
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
  // Whether there is a Hub, and whose session it is, is known only after the first answer.
  model.stateChanged.connect(() =>
    app.commands.notifyCommandChanged(CommandIDs.launchSession)
  );

  app.commands.addCommand(CommandIDs.notifyOutside, {
    label: trans.__('Notify Me of GPU Sessions Also While This Tab Is Hidden'),
    caption: trans.__('Let the browser ask whether this site may notify'),
    describedBy: NO_ARGS,
    isEnabled: canAsk,
    isVisible: canAsk,
    execute: async () => {
      await askToNotify();
      app.commands.notifyCommandChanged(CommandIDs.notifyOutside);
    }
  });

  app.commands.addCommand(CommandIDs.stopSession, {
    label: trans.__('End or Cancel Another GPU Session'),
    describedBy: {
      args: {
        type: 'object',
        required: ['id'],
        properties: {
          id: {
            type: 'integer',
            description: trans.__('The id of one of my other sessions')
          }
        }
      }
    },
    execute: args => stopSession(model, args, trans)
  });

  app.commands.addCommand(CommandIDs.keepSession, {
    label: trans.__('Keep an Idle GPU Session'),
    describedBy: {
      args: {
        type: 'object',
        required: ['id'],
        properties: {
          id: {
            type: 'integer',
            description: trans.__('The id of one of my sessions')
          }
        }
      }
    },
    execute: args => keepSession(model, args, trans)
  });
}

/** Keep the session; a refusal is shown as the service worded it. */
async function keepSession(
  model: IFGPUModel,
  args: ReadonlyPartialJSONObject,
  trans: TranslationBundle
): Promise<void> {
  try {
    await model.keep(args['id'] as number);
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    Notification.error(trans.__('The session was not kept: %1', why), {
      autoClose: false
    });
  }
}

/** Ask the user, then end or cancel the session; a refusal is shown as the service worded it. */
async function stopSession(
  model: IFGPUModel,
  args: ReadonlyPartialJSONObject,
  trans: TranslationBundle
): Promise<void> {
  const session = model.reading.status?.others.find(
    other => other.id === args['id']
  );
  if (session === undefined || session.id === null) {
    throw new Error(
      trans.__('fgpu:stop-session needs the id of one of my other sessions.')
    );
  }
  const name = session.display_name || trans.__('(default server)');
  const isWaiting = session.state === 'PENDING';
  const title = isWaiting
    ? trans.__('Cancel the request %1?', name)
    : trans.__('End %1?', name);
  const answer = await showDialog({
    title,
    body: isWaiting
      ? trans.__('It loses its place in the queue.')
      : trans.__('Its kernels stop, and what is only in their memory is lost.'),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Keep it') }),
      Dialog.warnButton({
        label: isWaiting ? trans.__('Cancel the Request') : trans.__('End')
      })
    ],
    defaultButton: 0
  });
  if (!answer.button.accept) {
    return;
  }
  try {
    await model.stop(session.id);
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    Notification.error(
      isWaiting
        ? trans.__('%1 was not cancelled: %2', name, why)
        : trans.__('%1 was not ended: %2', name, why),
      // Without it the message would only count up in the notification centre.
      { autoClose: false }
    );
  }
}
