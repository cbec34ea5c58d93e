import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';
import { PanelLayout } from '@lumino/widgets';

import { type IHubLocation, launchFormHref } from './links';
import { cellOf, type ICell, watchNotebooks } from './notebook';
import { requestFromOptions } from './offer';
import { OutOfMemoryNotice } from './oomnotice';
import { type IKernelError, isOutOfMemory, triedMib } from './outofmemory';
import type { IFGPUModel } from './tokens';

/** Explain, under the cell, each CUDA out-of-memory error of a notebook. */
export function watchForOutOfMemory(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle,
  hub: IHubLocation
): void {
  watchNotebooks(app, panel => {
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
      const canGrow = larger !== null && larger.in_place && id !== null;
      show(
        cell,
        new OutOfMemoryNotice({
          explanation,
          notebook: panel.context.path,
          href:
            larger === null || status === null
              ? null
              : launchFormHref(hub, status, larger.options),
          grow: canGrow
            ? () => model.resize(id, requestFromOptions(larger.options))
            : null,
          trans
        })
      );
    };
    return {
      onMessage: message => {
        if (message.header.msg_type !== 'error') {
          return;
        }
        const error = message.content as IKernelError;
        const cell = cellOf(panel, message);
        if (cell !== undefined && isOutOfMemory(error)) {
          void explain(cell, error);
        }
      }
    };
  });
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
