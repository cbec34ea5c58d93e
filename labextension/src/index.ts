import {
  ConnectionLost,
  IConnectionLost,
  ILayoutRestorer,
  JupyterFrontEnd,
  JupyterLab,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addCommands, CommandIDs } from './commands';
import { showEnd } from './connectionlost';
import { statusBarText } from './format';
import { sliceIcon } from './icon';
import { reportInput } from './input';
import type { IHubLocation } from './links';
import { FGPUModel } from './model';
import { addNotices, showFailure } from './notices';
import { watchForOutOfMemory } from './oomwatch';
import { FGPUPanel } from './panel';
import type { IContext } from './parts';
import { addRunningSection } from './running';
import { SHARE_MIME, ShareView } from './shareview';
import { FGPUStatusItem } from './statusitem';
import { IFGPUModel, type ISession } from './tokens';
import { watchForWaits } from './waitline';

const DOMAIN = 'jupyterlab_fgpu';
const PANEL_ID = 'jupyterlab-fgpu-panel';
const SETTINGS_ID = 'jupyterlab-fgpu:plugin';

const model: JupyterFrontEndPlugin<IFGPUModel> = {
  id: 'jupyterlab-fgpu:model',
  description: 'Polls the share of a GPU and the queue, once per tab.',
  autoStart: true,
  provides: IFGPUModel,
  activate: (app: JupyterFrontEnd): IFGPUModel => {
    const model = new FGPUModel(app.serviceManager.serverSettings);
    // The server has enough to do until the page is there.
    void app.restored.then(() => model.start());
    reportInput(app.serviceManager.serverSettings);
    return model;
  }
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
    ILayoutRestorer,
    IRenderMimeRegistry
  ],
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    paths: JupyterFrontEnd.IPaths | null,
    settings: ISettingRegistry | null,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    rendermime: IRenderMimeRegistry | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const hub = hubOf(paths);

    addCommands(
      app,
      model,
      trans,
      hub,
      PANEL_ID,
      () => void showEnd(app, model, trans, hub, null, true)
    );
    const run = (command: string) => (session: ISession) =>
      void app.commands.execute(command, { id: session.id });
    const keep = run(CommandIDs.keepSession);
    const extend = run(CommandIDs.extendSession);
    const context: IContext = {
      trans,
      hub,
      actions: {
        refresh: () => void app.commands.execute(CommandIDs.refresh),
        stop: run(CommandIDs.stopSession),
        endThis: () => void app.commands.execute(CommandIDs.endThisSession),
        renameThis: () =>
          void app.commands.execute(CommandIDs.renameThisSession),
        keep,
        extend,
        park: session => void showFailure(model.park(session.id as number), trans),
        neverPark: (session, never) =>
          void showFailure(model.neverPark(session.id as number, never), trans),
        wake: session => void showFailure(model.wake(session.id as number), trans),
        resize: (id, request) => model.resize(id, request),
        proof: begin => model.proof(begin)
      }
    };
    const widget = new FGPUPanel(model, context);
    widget.id = PANEL_ID;
    widget.title.icon = sliceIcon;
    widget.title.caption = trans.__('GPU share');
    widget.node.setAttribute('role', 'region');
    widget.node.setAttribute('aria-label', trans.__('GPU share'));
    // On the left, because the right area is out of sight on narrow screens.
    app.shell.add(widget, 'left', { rank: 300, type: 'GPU Share' });
    restorer?.add(widget, PANEL_ID);

    // Before the table in HTML that comes with it.
    rendermime?.addFactory(
      {
        safe: true,
        mimeTypes: [SHARE_MIME],
        createRenderer: () => new ShareView(model, context)
      },
      -10
    );

    const category = trans.__('GPU');
    for (const command of [
      CommandIDs.showPanel,
      CommandIDs.refresh,
      CommandIDs.launchSession,
      CommandIDs.openServicePage,
      CommandIDs.renameThisSession,
      CommandIDs.endThisSession,
      CommandIDs.notifyWhileHidden
    ]) {
      palette?.addItem({ command, category });
    }

    const enabled = { ready: true, ending: true };
    addNotices(model, trans, hub, enabled, keep, extend);

    const apply = (loaded: ISettingRegistry.ISettings) => {
      model.refreshPeriodS = loaded.composite['refreshPeriodS'] as number;
      enabled.ready = loaded.composite['notifyWhenReady'] as boolean;
      enabled.ending = loaded.composite['notifyBeforeEnd'] as boolean;
    };
    const loadSettings = async () => {
      // Nothing is asked before the page is there.
      await app.restored;
      const loaded = await settings?.load(SETTINGS_ID);
      if (loaded !== undefined) {
        apply(loaded);
        loaded.changed.connect(apply);
      }
    };
    loadSettings().catch(error =>
      console.warn(`${SETTINGS_ID}: the defaults are used.`, error)
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
      isActive: () => statusBarText(model.reading, Date.now(), trans) !== null,
      activeStateChanged: model.stateChanged
    });
  }
};

const running: JupyterFrontEndPlugin<void> = {
  id: 'jupyterlab-fgpu:running',
  description: 'Adds my other GPU sessions to the panel of what runs.',
  autoStart: true,
  requires: [IFGPUModel],
  optional: [JupyterFrontEnd.IPaths, IRunningSessionManagers, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    paths: JupyterFrontEnd.IPaths | null,
    managers: IRunningSessionManagers | null,
    translator: ITranslator | null
  ): void => {
    const hub = hubOf(paths);
    // Without a Hub there are no other sessions, and an empty section says nothing.
    if (managers === null || !hub.prefix) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    addRunningSection(managers, model, trans, hub, session => {
      void app.commands.execute(CommandIDs.stopSession, { id: session.id });
    });
  }
};

const cells: JupyterFrontEndPlugin<void> = {
  id: 'jupyterlab-fgpu:cells',
  description:
    'Shows at a cell that it waits for the GPU, and what to do about a CUDA out-of-memory error.',
  autoStart: true,
  requires: [IFGPUModel],
  optional: [JupyterFrontEnd.IPaths, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    paths: JupyterFrontEnd.IPaths | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    watchForOutOfMemory(app, model, trans, hubOf(paths));
    watchForWaits(app, model, trans);
  }
};

const ended: JupyterFrontEndPlugin<IConnectionLost> = {
  id: 'jupyterlab-fgpu:connection-lost',
  description: "Says why the session has ended, in place of the hub-extension's dialog.",
  autoStart: true,
  requires: [IFGPUModel],
  optional: [JupyterFrontEnd.IPaths, ITranslator, JupyterLab.IInfo],
  provides: IConnectionLost,
  activate: (
    app: JupyterFrontEnd,
    model: IFGPUModel,
    paths: JupyterFrontEnd.IPaths | null,
    translator: ITranslator | null,
    info: JupyterLab.IInfo | null
  ): IConnectionLost => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const hub = hubOf(paths);
    return (manager, error, translator) =>
      hub.prefix
        ? showEnd(app, model, trans, hub, info)
        : ConnectionLost(manager, error, translator);
  }
};

function hubOf(paths: JupyterFrontEnd.IPaths | null): IHubLocation {
  return {
    host: paths?.urls.hubHost ?? '',
    prefix: paths?.urls.hubPrefix ?? ''
  };
}

export { IFGPUModel } from './tokens';
export default [model, panel, status, running, cells, ended];
