import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { DocumentRegistry } from '@jupyterlab/docregistry';
import type { KernelMessage } from '@jupyterlab/services';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { DisposableDelegate } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import type { Widget } from '@lumino/widgets';

/** A line that is written into a cell's output. */
export interface IDisplayData {
  readonly output_type: 'display_data';
  readonly data: { readonly 'text/plain': string };
  readonly metadata: ReadonlyPartialJSONObject;
}

/** The part of a notebook panel that is used; JupyterLab's package for it has much that is not needed here. */
export interface INotebookPanel extends Widget {
  readonly context: { readonly path: string };
  readonly sessionContext: {
    readonly iopubMessage: ISignal<unknown, KernelMessage.IIOPubMessage>;
  };
  readonly content: { readonly widgets: readonly ICell[] };
}

export interface ICell extends Widget {
  readonly model: {
    readonly type: string;
    readonly outputs?: {
      readonly length: number;
      readonly changed: ISignal<unknown, unknown>;
      get(index: number): { readonly metadata: ReadonlyPartialJSONObject };
      set(index: number, output: IDisplayData): void;
      add(output: IDisplayData): number;
    };
  };
  readonly outputArea?: {
    readonly future: { readonly msg: KernelMessage.IMessage } | null;
  };
}

/** What follows one open notebook. */
export interface INotebookWatcher {
  onMessage(message: KernelMessage.IIOPubMessage): void;
  dispose?(): void;
}

/** Make a watcher for each notebook that is opened, and pass it the messages of the notebook's kernel. */
export function watchNotebooks(
  app: JupyterFrontEnd,
  watch: (panel: INotebookPanel) => INotebookWatcher
): void {
  app.docRegistry.addWidgetExtension('Notebook', {
    createNew: (widget: Widget) => {
      const panel = widget as INotebookPanel;
      const watcher = watch(panel);
      const onMessage = (_: unknown, message: KernelMessage.IIOPubMessage) =>
        watcher.onMessage(message);
      panel.sessionContext.iopubMessage.connect(onMessage);
      return new DisposableDelegate(() => {
        panel.sessionContext.iopubMessage.disconnect(onMessage);
        watcher.dispose?.();
      });
    }
  } as DocumentRegistry.WidgetExtension);
}

/** Return the cell that a kernel's message belongs to. */
export function cellOf(
  panel: INotebookPanel,
  message: KernelMessage.IIOPubMessage
): ICell | undefined {
  const parent = (message.parent_header as { msg_id?: string }).msg_id;
  return panel.content.widgets.find(
    one => parent && one.outputArea?.future?.msg.header.msg_id === parent
  );
}
