import type { TranslationBundle } from '@jupyterlab/translation';
import { VDomRenderer } from '@jupyterlab/ui-components';
import * as React from 'react';

import { problemWithAgeText, statusBarText } from './format';
import { sliceIcon } from './icon';
import type { IFGPUModel } from './tokens';

/** The slice in a few words; a click opens the panel. */
export class FGPUStatusItem extends VDomRenderer<IFGPUModel> {
  constructor(
    model: IFGPUModel,
    private readonly _trans: TranslationBundle,
    private readonly _open: () => void
  ) {
    super(model);
    this.addClass('jp-fgpu-StatusItem');
  }

  protected render(): JSX.Element | null {
    const text = statusBarText(this.model.reading, Date.now(), this._trans);
    if (text === null) {
      return null;
    }
    const problem = problemWithAgeText(this.model.reading, Date.now(), this._trans);
    const title = problem ?? this._trans.__('Show the GPU share and the queue');
    return (
      <button
        type="button"
        className={problem === null ? '' : 'jp-fgpu-mod-problem'}
        title={title}
        aria-label={`${text}. ${title}`}
        onClick={this._open}
      >
        <sliceIcon.react tag="span" width="14px" height="14px" />
        <span>{text}</span>
      </button>
    );
  }
}
