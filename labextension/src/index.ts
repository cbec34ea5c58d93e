import {
  ILayoutRestorer,
  JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, Notification } from '@jupyterlab/apputils';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addCommands, CommandIDs } from './commands';
import { hubHref, type IHubLocation, statusBarText } from './format';
import { sliceIcon } from './icon';
import { FGPUModel } from './model';
import { FGPUPanel } from './panel';
import { FGPUStatusItem } from './statusitem';
import { IFGPUModel, type ISession } from './tokens';

const DOMAIN = 'jupyterlab_fgpu';
const PANEL_ID = 'jupyterlab-fgpu-panel';
const SETTINGS_ID = 'jupyterlab-fgpu:plugin';

const model: JupyterFrontEndPlugin<IFGPUModel> = {
  id: 'jupyterlab-fgpu:model',
  description: 'Polls the share of a GPU and the queue, once per tab.',
  autoStart: true,
  provides: IFGPUModel,
  activate: (app: JupyterFrontEnd): IFGPUModel =>
    new FGPUModel(app.serviceManager.serverSettings)
};

const panel: JupyterFrontEndPlugin<void> = {
  id: SETTINGS_ID,
  description: 'Adds the side panel, the commands and the notifications.',
  autoStart: true,
  requires: [IFGPUModel],
  optional: [
    JupyterFrontEnd.IPaths,
    ISettingRegistry,
    ITranslator,
    ICommandPalette,
    ILayoutRestorer
  ],
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    paths: JupyterFrontEnd.IPaths | null,
    settings: ISettingRegistry | null,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const hub: IHubLocation = {
      host: paths?.urls.hubHost ?? '',
      prefix: paths?.urls.hubPrefix ?? ''
    };

    addCommands(app, model, trans, hub, PANEL_ID);
    const widget = new FGPUPanel(model, {
      trans,
      hub,
      actions: {
        refresh: () => void app.commands.execute(CommandIDs.refresh),
        stop: session =>
          void app.commands.execute(CommandIDs.stopSession, { id: session.id }),
        keep: session =>
          void app.commands.execute(CommandIDs.keepSession, { id: session.id })
      }
    });
    widget.id = PANEL_ID;
    widget.title.icon = sliceIcon;
    widget.title.caption = trans.__('GPU share');
    widget.node.setAttribute('role', 'region');
    widget.node.setAttribute('aria-label', trans.__('GPU share'));
    // On the left, because the right area is out of sight on narrow screens.
    app.shell.add(widget, 'left', { rank: 300, type: 'GPU Share' });
    restorer?.add(widget, PANEL_ID);

    const category = trans.__('GPU');
    for (const command of [
      CommandIDs.showPanel,
      CommandIDs.refresh,
      CommandIDs.openServicePage
    ]) {
      palette?.addItem({ command, category });
    }

    let notifyWhenReady = true;
    const notify = (_: IFGPUModel, session: ISession) => {
      if (!notifyWhenReady) {
        return;
      }
      const href = hubHref(hub, session.url);
      Notification.success(
        trans.__(
          '%1 is ready',
          session.display_name || trans.__('(default server)')
        ),
        {
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
        }
      );
    };
    model.ready.connect(notify);

    const apply = (loaded: ISettingRegistry.ISettings) => {
      model.refreshPeriodS = loaded.composite['refreshPeriodS'] as number;
      notifyWhenReady = loaded.composite['notifyWhenReady'] as boolean;
    };
    settings?.load(SETTINGS_ID).then(
      loaded => {
        apply(loaded);
        loaded.changed.connect(apply);
      },
      error => console.warn(`${SETTINGS_ID}: the defaults are used.`, error)
    );
  }
};

const status: JupyterFrontEndPlugin<void> = {
  id: 'jupyterlab-fgpu:status',
  description: 'Adds the share of a GPU to the status bar.',
  autoStart: true,
  requires: [IFGPUModel],
  optional: [IStatusBar, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    statusBar: IStatusBar | null,
    translator: ITranslator | null
  ): void => {
    if (statusBar === null) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    statusBar.registerStatusItem('jupyterlab-fgpu:status', {
      item: new FGPUStatusItem(model, trans, () => {
        void app.commands.execute(CommandIDs.showPanel);
      }),
      align: 'left',
      rank: 100,
      // With priority 0 it would be hidden on narrow screens.
      priority: 1,
      isActive: () => statusBarText(model.reading, trans) !== null,
      activeStateChanged: model.stateChanged
    });
  }
};

export { IFGPUModel } from './tokens';
export default [model, panel, status];
