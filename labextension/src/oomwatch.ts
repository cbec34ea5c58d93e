import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { DocumentRegistry } from '@jupyterlab/docregistry';
import type { KernelMessage } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import { DisposableDelegate } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { PanelLayout, type Widget } from '@lumino/widgets';

import { formHref, type IHubLocation } from './links';
import { wantedFrom } from './offer';
import { OutOfMemoryNotice } from './oomnotice';
import { type IKernelError, isOutOfMemory, triedMib } from './outofmemory';
import type { IFGPUModel } from './tokens';

/** The part of a notebook panel that is used; JupyterLab's package for it has much that is not needed here. */
interface INotebookPanel extends Widget {
  readonly context: { readonly path: string };
  readonly sessionContext: {
    readonly iopubMessage: ISignal<unknown, KernelMessage.IIOPubMessage>;
  };
  readonly content: { readonly widgets: readonly ICell[] };
}

interface ICell extends Widget {
  readonly model: {
    readonly type: string;
    readonly outputs?: {
      readonly length: number;
      readonly changed: ISignal<unknown, unknown>;
    };
  };
  readonly outputArea?: {
    readonly future: { readonly msg: KernelMessage.IMessage } | null;
  };
}

/** Explain, under the cell, each CUDA out-of-memory error of a notebook. */
export function watchForOutOfMemory(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation
): void {
  app.docRegistry.addWidgetExtension('Notebook', {
    createNew: (widget: Widget) => {
      const panel = widget as INotebookPanel;
      const onMessage = (_: unknown, message: KernelMessage.IIOPubMessage) => {
        if (message.header.msg_type !== 'error') {
          return;
        }
        const error = message.content as IKernelError;
        const parent = (message.parent_header as { msg_id?: string }).msg_id;
        const cell = panel.content.widgets.find(
          one => parent && one.outputArea?.future?.msg.header.msg_id === parent
        );
        if (cell !== undefined && isOutOfMemory(error)) {
          void explain(cell, error);
        }
      };
      const explain = async (cell: ICell, error: IKernelError) => {
        const run = cell.outputArea?.future;
        const explanation = await model.explain(triedMib(error)).catch(() => null);
        // Without a session there is no limit of ours; and the cell may run again by now.
        const isSame = !cell.isDisposed && cell.outputArea?.future === run;
        if (explanation === null || explanation.limit_mib === null || !isSame) {
          return;
        }
        const { status } = model.reading;
        const id = status?.session?.id ?? null;
        const { larger } = explanation;
        const grows = larger !== null && larger.in_place && id !== null;
        show(
          cell,
          new OutOfMemoryNotice({
            explanation,
            notebook: panel.context.path,
            href:
              larger === null || status === null
                ? null
                : formHref(hub, status, larger.options),
            grow: grows ? () => model.resize(id, wantedFrom(larger.options)) : null,
            trans
          })
        );
      };
      panel.sessionContext.iopubMessage.connect(onMessage);
      return new DisposableDelegate(() => {
        panel.sessionContext.iopubMessage.disconnect(onMessage);
      });
    }
  } as DocumentRegistry.WidgetExtension);
}

/** Put the notice under the cell's output, in place of an older one, until the output is cleared. */
function show(cell: ICell, notice: OutOfMemoryNotice): void {
  const { layout } = cell;
  const { outputs } = cell.model;
  if (!(layout instanceof PanelLayout) || outputs === undefined) {
    notice.dispose();
    return;
  }
  for (const widget of layout.widgets) {
    if (widget instanceof OutOfMemoryNotice) {
      widget.dispose();
    }
  }
  const after = layout.widgets.findIndex(widget =>
    widget.hasClass('jp-Cell-outputWrapper')
  );
  layout.insertWidget(after < 0 ? layout.widgets.length : after + 1, notice);
  const onOutputs = () => {
    if (outputs.length === 0) {
      notice.dispose();
    }
  };
  outputs.changed.connect(onOutputs);
  notice.disposed.connect(() => outputs.changed.disconnect(onOutputs));
}
